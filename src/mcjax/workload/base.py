"""Where requests come from. A workload knows the future; it hands out only what a client would send."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from mcjax.types import Request, Script, Tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """What a session sends next: the request, and (hidden from everyone else) what a simulated model would answer.

    `request.arrival_ns` is the session's `start_ns` for a first turn; for later turns it is the think time after the
    last one completed and its `children` ended.
    """

    request: Request
    script: Script
    children: tuple[Session, ...] = ()
    """Sessions that the answer starts, side by side. The next turn goes out only when all have ended, and none does if
    one of them did not play to its end."""
    background: tuple[Session, ...] = ()
    """Sessions that the answer starts and that no turn waits for."""


class Session(Protocol):
    """A conversation. Turns are asked for one at a time; a closed-loop session needs the answer to the last one."""

    start_ns: int
    """When the first turn is due: in the run's time; of a child, since the turn that starts it completed."""

    def next_turn(self, answer: Tokens | None) -> Turn | None:
        """The next turn, or None at the end. `answer` is what the last turn produced (`[T]`; None: use the script)."""
        ...


class Workload(Protocol):
    """A reproducible source of sessions: a function of its config, its files and the `workload` seed stream.

    One that knows beforehand how many requests it will send may say so as `total_requests`; progress then shows a
    share.
    """

    name: str
    block_tokens: int | None
    """Block size that the workload dictates (traces of block ids do), or None."""

    def sessions(self) -> Iterator[Session]:
        """Sessions in order of `start_ns`; ties in a fixed order."""
        ...

    def inputs(self) -> dict[str, str]:
        """sha256 of each input file, by path."""
        ...


class LengthPredictor(Protocol):
    """Guesses how many tokens a request will produce. Policies see this, never the script."""

    name: str

    def predict(self, request: Request) -> int: ...

    def observe(self, request: Request, output_tokens: int) -> None:
        """A request has completed with so many tokens."""
        ...
