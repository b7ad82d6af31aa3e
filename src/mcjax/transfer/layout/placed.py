"""Where blocks lie in a buffer, and the spans that one rank reads of another's region, one-sidedly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from mcjax.errors import LayoutMismatch
from mcjax.transfer.layout.numbers import DTYPE_BYTES, converted
from mcjax.transfer.layout.plan import Column, Moves, Plan
from mcjax.transfer.packing import merged, pieces, scatter
from mcjax.transfer.transports.endpoint import Spans


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Where the blocks of a request lie in a region of bytes: block `k` of it in slot `slots[k]` (`[blocks]` int64;
    -1: not there), and slot `s` at byte `start_bytes + s * stride_bytes`."""

    slots: Column
    stride_bytes: int
    start_bytes: int = 0

    def bytes_of(self, block: Column, byte: Column) -> Column:
        """Offsets in the region. Raises `LayoutMismatch` for a block that is not there."""
        beyond = block[(block < 0) | (block >= len(self.slots))]
        if len(beyond):
            raise LayoutMismatch(f"block {int(beyond[0])} of {len(self.slots)} is wanted")
        slots = self.slots[block]
        if (slots < 0).any():
            raise LayoutMismatch(f"block {int(block[slots < 0][0])} is wanted, and not there")
        return self.start_bytes + slots * self.stride_bytes + byte


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """The blocks of one group on one rank, in `buffer` (`[nbytes]`, contiguous)."""

    buffer: NDArray[np.uint8]
    blocks: Blocks

    def starts(self, blocks: Sequence[int], nbytes: int) -> Column:
        """Where blocks of `nbytes` begin. Raises `LayoutMismatch` for one that is not there, or not inside."""
        column: Column = np.array(blocks, np.int64)
        starts = self.blocks.bytes_of(column, np.zeros_like(column))
        outside = column[(starts < 0) | (starts > len(self.buffer) - nbytes)]
        if len(outside):
            raise LayoutMismatch(f"block {int(outside[0])} lies outside a region of {len(self.buffer)} bytes")
        return starts


def flat(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The bytes behind `[slots, block_bytes]`, from the first of the first slot to the last of the last, as a view:
    what an endpoint exposes of a store's buffer, whose slots are `blocks.strides[0]` bytes apart."""
    if not len(blocks):
        return np.zeros(0, np.uint8)
    return as_strided(blocks, ((len(blocks) - 1) * blocks.strides[0] + blocks.shape[1],), (1,))


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """What one target rank reads of one source rank's region for a group.

    `spans`: into the target's region, or, where numbers are to be converted, into `staged_bytes` of staging memory;
    then `finish` brings them to their places.
    """

    source_rank: int
    spans: Spans
    staged_bytes: int
    _places: Column
    _lengths: Column
    _dtypes: tuple[str, str]

    def finish(self, staging: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
        """Convert what has arrived in `staging` and scatter it to its places in the target's region."""
        if not self.staged_bytes:
            return
        source, target_dtype = self._dtypes
        arrived = self._lengths // DTYPE_BYTES[target_dtype] * DTYPE_BYTES[source]
        starts = np.cumsum(arrived) - arrived
        for piece in pieces(self._lengths):
            begin = int(starts[piece][0])
            staged = staging[begin : begin + int(arrived[piece].sum())].copy()  # aligned, wherever staging begins
            scatter(converted(staged, *self._dtypes), target, self._places[piece], self._lengths[piece])


def pulls(
    plan: Plan, group: str, rank: int, first: int, end: int, sources: Mapping[int, Blocks], target: Blocks
) -> list[Pull]:
    """What target rank `rank` has to read, from each source rank: exactly its heads' bytes, neighbours joined.

    `sources`: where each source rank's blocks lie in its region. Raises `LayoutMismatch` for blocks that are not there.
    """
    dtypes = plan.source.group(group).dtype, plan.target.group(group).dtype
    moves = plan.moves(group, first, end)
    found: list[Pull] = []
    for source, _, some in by_pair(moves.chosen(moves.target_rank == rank)):
        remote = sources[source].bytes_of(some.source_block, some.source_byte)
        local = target.bytes_of(some.target_block, some.target_byte)
        nbytes = some.count * some.source_item
        if dtypes[0] == dtypes[1]:
            (local, remote), nbytes = merged(local, remote, nbytes=nbytes)
            found.append(Pull(source, Spans(local, remote, nbytes), 0, local, nbytes, dtypes))
            continue
        staged = np.cumsum(nbytes) - nbytes
        lengths = some.count * some.target_item
        (staged, joined), nbytes = merged(staged, remote, nbytes=nbytes)
        found.append(Pull(source, Spans(staged, joined, nbytes), int(nbytes.sum()), local, lengths, dtypes))
    return found


def by_pair(moves: Moves) -> list[tuple[int, int, Moves]]:
    """`(source rank, target rank, their moves)`, ascending."""
    pairs = np.unique(np.stack([moves.source_rank, moves.target_rank], axis=1), axis=0)
    return [
        (source, target, moves.chosen((moves.source_rank == source) & (moves.target_rank == target)))
        for source, target in pairs.tolist()
    ]
