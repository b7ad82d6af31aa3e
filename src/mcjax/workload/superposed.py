"""Several workloads at once: each part plays as it would alone, and the system sees the sum."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np

from mcjax.errors import ConfigError
from mcjax.types import Request
from mcjax.workload.base import Workload
from mcjax.workload.mapped import Mapped, reseeded, spread_ids, workload_at
from mcjax.workload.streams import whole

PART_STREAM = 3


def part_seed(seed: int, name: str) -> int:
    """The seed of the part called `name`: another one for every name."""
    return int(np.random.SeedSequence(seed, spawn_key=(PART_STREAM, *name.encode())).generate_state(1, np.uint64)[0])


class Superposed:
    """The sum of workloads. Request ids, block ids and session names of different parts never meet.

    A part that draws gets a seed of its own, made of `seed` and the part's name; the `seed` in the part's own config
    is not used. Request `r` of part `i` of `n` becomes `r * n + i`, block ids likewise: so parts share no blocks
    but those made of equal tokens.

    Args:
        parts: name to workload.
        seed: of the `workload` stream.
        tenant_by_part: name each request's tenant after its part; then not even equal tokens are shared between parts.
    """

    def __init__(self, parts: Mapping[str, Any], seed: int = 0, tenant_by_part: bool = False):
        whole("seed", seed, 0)
        if not parts:
            raise ConfigError("workload.parts", {}, "needs at least one part")
        self.name = "superposed"
        self._given = {str(name): workload_at(f"parts.{name}", part) for name, part in parts.items()}
        sizes = {name: part.block_tokens for name, part in self._given.items() if part.block_tokens is not None}
        if len(set(sizes.values())) > 1:
            problem = "parts dictate different block sizes; bring them together with mcjax.workload.reblocked.Reblocked"
            raise ConfigError("workload.parts", sizes, problem)
        self.block_tokens: int | None = next(iter(sizes.values()), None)
        self._tenant_by_part = tenant_by_part
        self._parts = self._seeded(seed)

    def reseeded(self, seed: int) -> Self:
        """The same parts under another seed."""
        other = copy.copy(self)
        other._parts = self._seeded(seed)
        return other

    @property
    def total_requests(self) -> int | None:
        """Requests of all parts, if every part can tell."""
        totals = [getattr(part, "total_requests", None) for part in self._parts.values()]
        known = [int(total) for total in totals if total is not None]
        return sum(known) if len(known) == len(totals) else None

    def sessions(self) -> Iterator[Mapped]:
        """Sessions in order of start; ties in order of the parts."""
        playing = [self._play(index, name, part) for index, (name, part) in enumerate(self._parts.items())]
        return heapq.merge(*playing, key=lambda session: session.start_ns)

    def inputs(self) -> dict[str, str]:
        return {path: digest for part in self._parts.values() for path, digest in part.inputs().items()}

    def _seeded(self, seed: int) -> dict[str, Workload]:
        return {name: reseeded(part, part_seed(seed, name)) for name, part in self._given.items()}

    def _play(self, index: int, name: str, part: Workload) -> Iterator[Mapped]:
        count, key = len(self._parts), f"parts.{name}"

        def change(request: Request) -> Request:
            ids = request.trace_ids
            return replace(
                request,
                request_id=request.request_id * count + index,
                parent=None if request.parent is None else request.parent * count + index,
                trace_ids=None if ids is None else tuple(block + index for block in spread_ids(key, ids, count)),
                session=f"{name}/{request.session}",
                tenant=name if self._tenant_by_part else request.tenant,
            )

        for session in part.sessions():
            yield Mapped(session, session.start_ns, change)
