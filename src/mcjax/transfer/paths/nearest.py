"""One path a copy: the one nearest to the memories, and among equals the one with least to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcjax.transfer.paths.base import Candidate, near


@dataclass(frozen=True)
class Nearest:
    """Inside the switch domain if it can, then by NUMA distance, then by the shortest queue (in time). Never striped.

    Mooncake's preference for the NICs of a memory's own NUMA node (FAST'25, 4.3), with the queue instead of chance.
    """

    def choose(self, blocks: int, block_bytes: int, candidates: Sequence[Candidate]) -> Sequence[int]:
        def order(index: int) -> tuple[int, float, int, int]:
            candidate = candidates[index]
            queue_s = candidate.queued_bytes / candidate.bytes_per_s
            return candidate.rail.distance, queue_s, candidate.moved_bytes, index

        counts = [0] * len(candidates)
        counts[min(near(candidates), key=order)] = blocks
        return counts
