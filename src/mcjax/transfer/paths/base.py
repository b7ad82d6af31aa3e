"""The decision which paths a copy takes: its protocol, and what it is told of each path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mcjax.errors import ConfigError
from mcjax.transfer.base import Rail


@dataclass(frozen=True, slots=True)
class Candidate:
    """A path that a copy may take now: healthy, or the least bad of all."""

    name: str
    rail: Rail
    queued_bytes: int
    """What waits for it and what is under way on it."""
    bytes_per_s: float
    latency_s: float
    """As learned from what it did lately."""
    moved_bytes: int = 0
    """So far: what breaks ties, so that nobody idles."""


class PathChoice(Protocol):
    """A strategy of the group `transfer/paths`. A pure function of what it is given."""

    def choose(self, blocks: int, block_bytes: int, candidates: Sequence[Candidate]) -> Sequence[int]:
        """How many of a copy's `blocks` (1 or more, of `block_bytes` each) go by each of `candidates` (2 or more):
        `[candidates]` counts, 0 or more, that add up to `blocks`."""
        ...


def near(candidates: Sequence[Candidate]) -> list[int]:
    """Indices of those that stay inside the switch domain, ascending; of all, where none does."""
    inside = [index for index, each in enumerate(candidates) if not each.rail.crosses]
    return inside or list(range(len(candidates)))


def rate_to_memory(candidate: Candidate, far_penalty: float) -> float:
    """Bytes a second, less what it costs to reach a NIC of another NUMA node: `1 / (1 + far_penalty * distance)`."""
    return candidate.bytes_per_s / (1.0 + far_penalty * candidate.rail.distance)


def soonest(blocks: int, nbytes: int, candidates: Sequence[Candidate], rates: Sequence[float]) -> list[int]:
    """All blocks to the one nearby candidate that has them there first; of equals, to the one that has moved least."""

    def order(index: int) -> tuple[float, int, int]:
        candidate = candidates[index]
        wait_s = candidate.latency_s + candidate.queued_bytes / candidate.bytes_per_s
        return wait_s + nbytes / rates[index], candidate.moved_bytes, index

    counts = [0] * len(candidates)
    counts[min(near(candidates), key=order)] = blocks
    return counts


def apportion(blocks: int, weights: Sequence[float], least: int) -> list[int]:
    """Whole blocks by weight: `[weights]`, each its share, rounded by largest remainder (ties: lowest index).

    Whoever would get fewer than `least` gets none, the smallest first, as long as somebody is left.
    """
    kept = [index for index, weight in enumerate(weights) if weight > 0] or list(range(len(weights)))
    flat = not any(weight > 0 for weight in weights)
    while True:
        total = sum(1.0 if flat else weights[index] for index in kept)
        exact = {index: blocks * (1.0 if flat else weights[index]) / total for index in kept}
        smallest = min(kept, key=lambda index: (exact[index], -index))
        if len(kept) == 1 or exact[smallest] >= min(least, blocks):
            break
        kept.remove(smallest)
    counts = [0] * len(weights)
    for index in kept:
        counts[index] = int(exact[index])
    by_remainder = sorted(kept, key=lambda index: (counts[index] - exact[index], index))
    for index in by_remainder[: blocks - sum(counts)]:
        counts[index] += 1
    return counts


def check_stripes(stripe_bytes: int, far_penalty: float) -> None:
    """Raises `ConfigError` for parameters of a striping strategy that make no sense."""
    if stripe_bytes < 1:
        raise ConfigError("transfer.paths.stripe_bytes", stripe_bytes, "must be at least 1 byte")
    if not 0 <= far_penalty < math.inf:
        raise ConfigError("transfer.paths.far_penalty", far_penalty, "must be a number from 0 on")


def least_blocks(stripe_bytes: int, block_bytes: int) -> int:
    """The fewest blocks that make a stripe of `stripe_bytes`: 1 or more."""
    return max(1, -(-stripe_bytes // block_bytes))
