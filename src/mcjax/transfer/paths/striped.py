"""Every copy over all NICs, by what they can carry, whatever waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcjax.transfer.paths.base import Candidate, apportion, check_stripes, least_blocks, near, rate_to_memory, soonest


@dataclass(frozen=True)
class Striped:
    """Inside the switch domain if it can: to each path its share of the blocks, by the rate that the path has shown.

    A copy of less than two stripes goes whole, where it is there first.
    """

    stripe_bytes: int = 1 << 20  # a part of a copy is no smaller, unless the copy is
    far_penalty: float = 0.5  # how much slower a NIC counts for each step of NUMA distance

    def __post_init__(self) -> None:
        check_stripes(self.stripe_bytes, self.far_penalty)

    def choose(self, blocks: int, block_bytes: int, candidates: Sequence[Candidate]) -> Sequence[int]:
        rates = [rate_to_memory(candidate, self.far_penalty) for candidate in candidates]
        least = least_blocks(self.stripe_bytes, block_bytes)
        if blocks < 2 * least:
            return soonest(blocks, blocks * block_bytes, candidates, rates)
        weights = [0.0] * len(candidates)
        for index in near(candidates):
            weights[index] = rates[index]
        return apportion(blocks, weights, least)
