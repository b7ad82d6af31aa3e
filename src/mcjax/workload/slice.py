"""A part of another workload: the sessions that start in a stretch of its time."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import ConfigError
from mcjax.types import NS_PER_S
from mcjax.workload.base import Session
from mcjax.workload.mapped import Mapped, reseeded, workload_at
from mcjax.workload.streams import number, rate, whole


class Slice:
    """Sessions of `of` that start in `[start_s, end_s)`; the slice's own time begins at its start.

    With `slices`, that stretch is cut into so many parts of equal length, and the part `index` is taken: some to tune a
    policy on, others to judge it by. Requests keep their ids; nothing else about a session changes, so a session that
    starts in the slice plays to its end. Caches start cold: what was sent before the slice is not there.

    Args:
        of: the workload.
        start_s: where the stretch begins, in the time of `of`.
        end_s: where it ends; None for just after the last session.
        slices: parts of equal length; 1 takes the whole stretch.
        index: which of them, from 0.
        rate_scale: sessions start so many times faster (think times stay).
        limit: take only the first so many sessions; None for all.
        delay_s: the slice's own time begins so long before the stretch; stretches side by side
            (`superposed`) that begin one after the other are a trace that changes its character.

    Raises `ConfigError` if nothing starts there.
    """

    def __init__(
        self,
        of: Any,
        start_s: float = 0.0,
        end_s: float | None = None,
        slices: int = 1,
        index: int = 0,
        rate_scale: float = 1.0,
        limit: int | None = None,
        delay_s: float = 0.0,
    ):
        self.name = "slice"
        self._of = workload_at("of", of)
        self.block_tokens: int | None = self._of.block_tokens
        start_ns = round(number("start_s", start_s, 0) * NS_PER_S)
        if end_s is not None and number("end_s", end_s, 0) <= start_s:
            raise ConfigError("workload.end_s", end_s, f"must be after start_s={start_s}")
        if whole("index", index, 0) >= whole("slices", slices, 1):
            raise ConfigError("workload.index", index, f"must be below slices={slices}")
        self._rate_scale = rate("rate_scale", rate_scale)
        self._delay_ns = round(number("delay_s", delay_s, 0) * NS_PER_S)
        self._limit = None if limit is None else whole("limit", limit, 1)
        starts_ns = self._starts_ns(None if end_s is None else round(end_s * NS_PER_S))
        if end_s is None:
            end_ns = int(starts_ns.max(initial=0)) + 1
        else:
            end_ns = round(end_s * NS_PER_S)
        length_ns = max(0, end_ns - start_ns)
        self._from_ns = start_ns + length_ns * index // slices
        self._to_ns = start_ns + length_ns * (index + 1) // slices
        chosen = int(np.count_nonzero((starts_ns >= self._from_ns) & (starts_ns < self._to_ns)))
        one_each = end_s is None and getattr(self._of, "total_requests", None) == len(starts_ns)
        self.total_requests: int | None = min(chosen, self._limit or chosen) if one_each else None
        """Known where a session is a request."""
        if not chosen:
            problem = f"no session starts in {self._from_ns / NS_PER_S:g} .. {self._to_ns / NS_PER_S:g} s"
            raise ConfigError("workload.start_s", start_s, problem)

    def reseeded(self, seed: int) -> Self:
        """The same stretch of time of the workload under another seed."""
        other = copy.copy(self)
        other._of = reseeded(self._of, seed)
        return other

    def sessions(self) -> Iterator[Mapped]:
        for count, session in enumerate(self._chosen()):
            if self._limit is not None and count >= self._limit:
                return
            start_ns = self._delay_ns + round((session.start_ns - self._from_ns) / self._rate_scale)
            yield Mapped(session, start_ns)

    def inputs(self) -> dict[str, str]:
        return self._of.inputs()

    def _starts_ns(self, end_ns: int | None) -> NDArray[np.int64]:
        """`[N]`: when the sessions start, up to the end of the stretch, in order."""
        sessions = self._of.sessions()
        if end_ns is not None:
            sessions = itertools.takewhile(lambda session: session.start_ns < end_ns, sessions)
        return np.fromiter((session.start_ns for session in sessions), np.int64)

    def _chosen(self) -> Iterator[Session]:
        for session in self._of.sessions():
            if session.start_ns >= self._to_ns:
                return
            if session.start_ns >= self._from_ns:
                yield session
