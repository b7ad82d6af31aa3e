"""What workloads made of other workloads share: sessions whose requests are changed on their way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mcjax.errors import ConfigError
from mcjax.types import Request, Tokens
from mcjax.workload.base import Session, Turn, Workload


class Mapped:
    """Plays `session`, started at `start_ns`, with `change` applied to its requests and to those of its children."""

    def __init__(self, session: Session, start_ns: int, change: Callable[[Request], Request] | None = None):
        self.start_ns = start_ns
        self._session = session
        self._change = change
        self._first = True

    def next_turn(self, answer: Tokens | None) -> Turn | None:
        turn = self._session.next_turn(answer)
        if turn is None:
            return None
        request = turn.request if self._change is None else self._change(turn.request)
        if self._first:
            request = replace(request, arrival_ns=self.start_ns)
        self._first = False
        return Turn(request, turn.script, self._mapped(turn.children), self._mapped(turn.background))

    def _mapped(self, children: tuple[Session, ...]) -> tuple[Session, ...]:
        return tuple(Mapped(child, child.start_ns, self._change) for child in children)


def workload_at(key: str, given: Any) -> Workload:
    """`given`, or `ConfigError` naming `workload.<key>` if it is no workload (a config without `_target_` is none)."""
    if not callable(getattr(given, "sessions", None)) or not callable(getattr(given, "inputs", None)):
        problem = "must be a workload, with a _target_ of its own"
        raise ConfigError(f"workload.{key}", type(given).__name__, problem)
    return given


def reseeded(workload: Workload, seed: int) -> Workload:
    """The workload under another seed, if it draws anything; those that do have a method `reseeded(seed)`."""
    method: Callable[[int], Workload] | None = getattr(workload, "reseeded", None)
    return workload if method is None else method(seed)


def spread_ids(key: str, ids: tuple[int, ...], factor: int) -> tuple[int, ...]:
    """Ids `factor` times as large, with room between them. Raises `ConfigError` if they exceed 63 bits."""
    if ids and max(ids) >= 2**63 // factor:
        raise ConfigError(f"workload.{key}", max(ids), f"block ids must stay below 2^63 / {factor} for this")
    return tuple(block * factor for block in ids)
