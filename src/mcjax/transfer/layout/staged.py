"""Plans on host memory: strided copies, block by block, straight or by way of one contiguous stretch.

Where heads are cut, what lies side by side in both layouts is a few hundred bytes long, and a list of it has a million
rows. But it is regular: within one block of either side it is a box of layers, keys and values, tokens and heads, which
is copied as a view. What one rank has for another goes into a stretch, box after box, and is moved as one span.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mcjax.transfer.layout.describe import ORDER, GroupLayout
from mcjax.transfer.layout.numbers import converted
from mcjax.transfer.layout.placed import Placed
from mcjax.transfer.layout.plan import Column, Plan, rows

Memories: TypeAlias = Mapping[tuple[str, int], Placed]
"""By group and rank."""


@dataclass(frozen=True, slots=True)
class Box:
    """Layers and heads that one rank has for another: side by side on both, by numbers in the group."""

    source_layer: int
    target_layer: int
    layers: int
    first_head: int
    heads: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows that lie in one block on both sides, side by side."""

    source_block: int
    source_row: int
    target_block: int
    target_row: int
    rows: int


def boxes(plan: Plan, group: str, source: int, target: int) -> list[Box]:
    """What source rank `source` has for target rank `target`; nothing, if others serve it."""
    found: list[Box] = []
    for holder, (there, here), heads in plan.served(group)[target]:
        if holder == source:
            for layer in np.unique(here).tolist():
                mine = here == layer
                for first, count in _runs(heads[mine]):
                    _add(found, Box(int(there[mine][0]), layer, 1, first, count))
    return found


def stretches(plan: Plan, group: str, first: int, end: int) -> list[Stretch]:
    """Of tokens `first .. end` (exclusive) of a request; see `Plan.moves` for what that means in each kind."""
    source, target = plan.source.group(group), plan.target.group(group)
    if source.kind == "window":
        first = max(first, end - source.window_tokens)
    (source_block, source_row), (target_block, target_row) = rows(source, target, first, end)
    if not len(source_block):
        return []
    same = (source_block[1:] == source_block[:-1]) & (target_block[1:] == target_block[:-1])
    firsts = np.flatnonzero(np.concatenate([[True], ~same]))
    counts = np.diff(np.concatenate([firsts, [len(source_block)]]))
    columns = (source_block[firsts], source_row[firsts], target_block[firsts], target_row[firsts], counts)
    return [Stretch(*numbers) for numbers in zip(*(column.tolist() for column in columns), strict=True)]


def apply(plan: Plan, sources: Memories, targets: Memories, first: int, end: int) -> int:
    """Carry tokens `first .. end` of a request out in host memory. Returns the bytes written.

    Raises `LayoutMismatch` for a block that is not there, before any byte is written; `Unencodable` for a number too
    large for the target's dtype.
    """
    for group in plan.source.groups:
        for source, target in pairs(plan, group.name):
            found = stretches(plan, group.name, first, end)
            nbytes = group.block_bytes(source, plan.source.encoding)
            sources[group.name, source].starts([stretch.source_block for stretch in found], nbytes)
            nbytes = plan.target.group(group.name).block_bytes(target, plan.target.encoding)
            targets[group.name, target].starts([stretch.target_block for stretch in found], nbytes)
    written = 0
    for group in plan.source.groups:
        for source, target in pairs(plan, group.name):
            here, there = sources[group.name, source], targets[group.name, target]
            for read, write in _views(plan, group.name, (source, target), first, end, here, there):
                write[:] = _numbers(plan, group.name, read)
                written += write.size
    return written


def pairs(plan: Plan, group: str) -> list[tuple[int, int]]:
    """`(source rank, target rank)` of which the first has something for the second, ascending."""
    return sorted((holder, target) for target, entries in enumerate(plan.served(group)) for holder, _, _ in entries)


def staged_bytes(plan: Plan, group: str, source: int, target: int, first: int, end: int) -> int:
    """Length of the stretch that `pack` fills."""
    layout = plan.source.group(group)
    vector = sum(nbytes for _, nbytes in layout.planes(source, plan.source.encoding))
    vectors = sum(box.layers * box.heads for box in boxes(plan, group, source, target)) * layout.keys_and_values
    return vector * vectors * sum(stretch.rows for stretch in stretches(plan, group, first, end))


def pack(
    plan: Plan, group: str, source: int, target: int, first: int, end: int, here: Placed, staging: NDArray[np.uint8]
) -> None:
    """Gather, on the source's side, all that rank `source` has for rank `target` into `staging`.

    Raises `LayoutMismatch` for a block that is not there.
    """
    at = 0
    for read, _ in _views(plan, group, (source, target), first, end, here, None):
        staging[at : at + read.size].reshape(read.shape)[:] = read
        at += read.size


def unpack(
    plan: Plan, group: str, source: int, target: int, first: int, end: int, staging: NDArray[np.uint8], there: Placed
) -> None:
    """Bring what `pack` gathered to its places on the target's side, converted where dtypes differ.

    Raises `LayoutMismatch` for a block that is not there, `Unencodable` for a number too large for the target's dtype.
    """
    at = 0
    ratio = plan.source.group(group).number_bytes, plan.target.group(group).number_bytes
    for _, write in _views(plan, group, (source, target), first, end, None, there):
        nbytes = write.size if plan.source.encoding != "none" else write.size // ratio[1] * ratio[0]
        shape = (*write.shape[:-1], nbytes // (write.size // write.shape[-1]))
        write[:] = _numbers(plan, group, staging[at : at + nbytes].reshape(shape))
        at += nbytes


def _views(
    plan: Plan,
    group: str,
    ranks: tuple[int, int],
    first: int,
    end: int,
    here: Placed | None,
    there: Placed | None,
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    """`[layers, kv, rows, heads, bytes of a vector]` on either side, of each box in each stretch and each plane; an
    empty array for a side that is not given."""
    source, target = plan.source.group(group), plan.target.group(group)
    found, none = boxes(plan, group, *ranks), np.zeros(0, np.uint8)
    for stretch in stretches(plan, group, first, end):
        read = _planes(source, ranks[0], plan.source.encoding, here, stretch.source_block)
        write = _planes(target, ranks[1], plan.target.encoding, there, stretch.target_block)
        for box in found:
            shards = source.shards[ranks[0]], target.shards[ranks[1]]
            mine = (
                slice(box.source_layer - shards[0].first_layer, box.source_layer - shards[0].first_layer + box.layers),
                slice(None),
                slice(stretch.source_row, stretch.source_row + stretch.rows),
                slice(box.first_head - shards[0].first_head, box.first_head - shards[0].first_head + box.heads),
            )
            its = (
                slice(box.target_layer - shards[1].first_layer, box.target_layer - shards[1].first_layer + box.layers),
                slice(None),
                slice(stretch.target_row, stretch.target_row + stretch.rows),
                slice(box.first_head - shards[1].first_head, box.first_head - shards[1].first_head + box.heads),
            )
            for plane in range(max(len(read), len(write))):
                yield (read[plane][mine] if read else none), (write[plane][its] if write else none)


def _planes(group: GroupLayout, rank: int, encoding: str, place: Placed | None, block: int) -> list[NDArray[np.uint8]]:
    """Each plane of a block, `[layer, kv, token, head, bytes of a vector]`, as views."""
    if place is None:
        return []
    shard = group.shards[rank]
    sizes = {"layer": shard.layers, "kv": group.keys_and_values, "token": group.rows, "head": shard.heads}
    start = int(place.starts([block], group.block_bytes(rank, encoding))[0])
    planes: list[NDArray[np.uint8]] = []
    for base, nbytes in group.planes(rank, encoding):
        plane = place.buffer[start + base : start + base + group.vectors(rank) * nbytes]
        shaped = plane.reshape(*(sizes[axis] for axis in group.order), nbytes)
        planes.append(shaped.transpose(*(group.order.index(axis) for axis in ORDER), 4))
    return planes


def _numbers(plan: Plan, group: str, read: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same numbers as the target keeps them."""
    source, target = plan.source.group(group).dtype, plan.target.group(group).dtype
    if source == target:
        return read
    flat = np.ascontiguousarray(read).reshape(-1)
    if flat.ctypes.data % 4:
        flat = flat.copy()  # numbers are looked at as words, and begin anywhere in what has arrived
    return converted(flat, source, target).reshape(*read.shape[:-1], -1)


def _runs(heads: Column) -> list[tuple[int, int]]:
    """`(first, count)` of neighbours in an ascending list."""
    breaks = np.flatnonzero(np.diff(heads) != 1) + 1
    return [(int(run[0]), len(run)) for run in np.split(heads, breaks) if len(run)]


def _add(found: list[Box], box: Box) -> None:
    """Join a box to the one it continues."""
    for index in range(len(found) - 1, -1, -1):
        last = found[index]
        if (
            (last.first_head, last.heads) == (box.first_head, box.heads)
            and last.source_layer + last.layers == box.source_layer
            and last.target_layer + last.layers == box.target_layer
        ):
            found[index] = Box(last.source_layer, last.target_layer, last.layers + 1, last.first_head, last.heads)
            return
    found.append(box)
