"""Every copy over as many NICs as bring it there soonest, given what waits for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcjax.transfer.paths.base import Candidate, apportion, check_stripes, least_blocks, near, rate_to_memory, soonest


@dataclass(frozen=True)
class LeastQueued:
    """Inside the switch domain if it can: all parts of a copy shall arrive at the same time, and that the earliest.

    Paths are filled like vessels: each has its queue's time in it already, and the copy's blocks raise the lowest
    levels first, until all are poured. Who would get less than a stripe gets nothing; a copy of less than two goes
    whole.
    """

    stripe_bytes: int = 1 << 20  # a part of a copy is no smaller, unless the copy is
    far_penalty: float = 0.5  # how much slower a NIC counts for each step of NUMA distance

    def __post_init__(self) -> None:
        check_stripes(self.stripe_bytes, self.far_penalty)

    def choose(self, blocks: int, block_bytes: int, candidates: Sequence[Candidate]) -> Sequence[int]:
        nbytes, least = blocks * block_bytes, least_blocks(self.stripe_bytes, block_bytes)
        rates = [rate_to_memory(candidate, self.far_penalty) for candidate in candidates]
        if blocks < 2 * least:
            return soonest(blocks, nbytes, candidates, rates)
        ready_s = [candidate.latency_s + candidate.queued_bytes / candidate.bytes_per_s for candidate in candidates]
        order = sorted(near(candidates), key=lambda index: (ready_s[index], candidates[index].moved_bytes, index))
        rate = queued = 0.0
        level_s = 0.0
        for index in order:
            if rate and ready_s[index] >= level_s:
                break  # the copy is there before this path could begin
            rate += rates[index]
            queued += rates[index] * ready_s[index]
            level_s = (nbytes + queued) / rate
        weights = [0.0] * len(candidates)
        for index in order:
            weights[index] = max(0.0, level_s - ready_s[index]) * rates[index]
        return apportion(blocks, weights, least)
