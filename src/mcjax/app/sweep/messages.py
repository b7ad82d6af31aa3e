"""What a sweep and its worker processes say to each other, pickled, over a socket that only the two of them hold.

Nothing of it is read from a file or a network, and a worker runs the caller's own code in any case.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from mcjax.track.console import Figures, Outlook
from mcjax.track.run import Run


@dataclass(frozen=True, slots=True)
class Job:
    """One point: all words that make its config, and the caller's own strategies, pickled (empty: none)."""

    overrides: tuple[str, ...]
    sweep: str = ""
    strategies: bytes = b""


@dataclass(frozen=True, slots=True)
class Stage:
    """Getting ready: loading weights, compiling, measuring."""

    what: str
    share_done: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a point ended; `state` is one of `mcjax.track.sweep`. `run` is what `execute` returned, if it did."""

    state: str
    reason: str = ""
    run: Run | None = None


Event = Outlook | Stage | Figures | Outcome
"""What a worker tells of the point that it plays; the outcome comes last."""


def send(connection: Connection, message: Job | Event) -> None:
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """Raises `EOFError` or `OSError` when the other side is gone."""
    return pickle.loads(connection.recv_bytes())
