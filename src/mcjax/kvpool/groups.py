"""The parts of a block: one a KV group, one a shard. A block is of use only where all of it is there."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mcjax.types import KVGroup


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a block: KV heads `first_head .. last_head` (exclusive)."""

    rank: int
    first_head: int
    last_head: int


def boundary(groups: Sequence[KVGroup]) -> int:
    """Blocks between two places where a match may end in every group: the least common multiple of their multiples."""
    return math.lcm(*(group.block_multiple for group in groups))


def common_prefix(blocks_by_group: Sequence[int], groups: Sequence[KVGroup]) -> int:
    """Blocks of a match, given how many leading blocks are resident in each group: the last boundary that all reach."""
    if len(blocks_by_group) != len(groups):
        raise ValueError(f"{len(blocks_by_group)} residencies for {len(groups)} groups")
    resident = min(blocks_by_group)
    return resident - resident % boundary(groups)


def complete(present: Collection[Shard], wanted: Collection[Shard]) -> bool:
    """Whether a replica exists: only when every shard that the format wants is there."""
    return all(shard in present for shard in wanted)
