"""From blocks of one layout to blocks of another: which bytes of which shard's block go where.

Both sides are looked at as vectors (of a layer, key or value, token and head), whose places follow from the layouts;
what lies side by side on both is one move. What repeats, a stretch of as many tokens as is whole blocks on both sides,
is worked out once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import LayoutMismatch
from mcjax.transfer.layout.describe import GroupLayout, Layout
from mcjax.transfer.layout.numbers import lossy

Column = NDArray[np.int64]

Served: TypeAlias = tuple[int, tuple[Column, Column], Column]
"""A source rank, and what a target rank takes from it: `((layers there, layers here), heads)`, `[m]` each, by their
numbers in the group."""

MOST_VECTORS = 1 << 24
"""Of a repeating stretch on all ranks: more would be a table of gigabytes, and is no layout that anybody has."""


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Stretches of bytes, `[n]` int64 each, ascending by target: bytes of block number `source_block` of a rank to
    bytes of block number `target_block` of another. `count` numbers of `source_item` bytes become as many of
    `target_item` bytes; where nothing is converted both are 1."""

    source_rank: Column
    source_block: Column
    source_byte: Column
    target_rank: Column
    target_block: Column
    target_byte: Column
    count: Column
    source_item: int = 1
    target_item: int = 1

    def __len__(self) -> int:
        return len(self.count)

    @property
    def read_bytes(self) -> int:
        return int(self.count.sum()) * self.source_item

    @property
    def written_bytes(self) -> int:
        return int(self.count.sum()) * self.target_item

    def chosen(self, which: NDArray[np.bool_]) -> Moves:
        """Those moves alone."""
        return self.with_columns([column[which] for column in self.columns()])

    def columns(self) -> list[Column]:
        """All seven, in their order here."""
        return [getattr(self, column.name) for column in fields(self)[:7]]

    def with_columns(self, columns: Sequence[Column]) -> Moves:
        """Others of the same items."""
        return Moves(*columns, self.source_item, self.target_item)  # pyright: ignore[reportCallIssue]

    def shifted(self, times: Column, source_blocks: int, target_blocks: int) -> Moves:
        """These moves once for each of `times` (`[k]`), so many blocks further each time."""

        def tiled(column: Column, step: int) -> Column:
            return (column[None, :] + (times * step)[:, None]).reshape(-1)

        steps = {"source_block": source_blocks, "target_block": target_blocks}
        columns = [tiled(getattr(self, found.name), steps.get(found.name, 0)) for found in fields(self)[:7]]
        return self.with_columns(columns)

    @classmethod
    def together(cls, parts: Sequence[Moves]) -> Moves:
        """All of them, one after the other; `parts` are of one group and not empty."""
        columns = [np.concatenate(column) for column in zip(*(part.columns() for part in parts), strict=True)]
        return parts[0].with_columns(columns)


@dataclass(frozen=True, slots=True)
class Conversion:
    """A step after the move: numbers of a group become those of another dtype, by the processor of the receiver."""

    group: str
    source: str
    target: str

    @property
    def lossy(self) -> bool:
        return lossy(self.source, self.target)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What `plan` made of two layouts that go together."""

    source: Layout
    target: Layout
    conversions: tuple[Conversion, ...]
    """Groups whose dtypes differ."""
    _repeating: dict[str, Moves] = field(default_factory=dict[str, Moves])
    _served: dict[str, list[list[Served]]] = field(default_factory=dict[str, list[list[Served]]])

    @property
    def lossy(self) -> bool:
        """Whether what arrives may differ from what was computed, as `Packer.lossy` has it."""
        return any(conversion.lossy for conversion in self.conversions)

    @property
    def straight(self) -> bool:
        """Whether both sides lie alike: then whole blocks are copied, and nothing need be planned."""
        return not self.source.differences(self.target)

    @property
    def boundary_tokens(self) -> int:
        """A prefix that is to be matched on both sides ends at a multiple of so many tokens."""
        return math.lcm(self.source.boundary_tokens, self.target.boundary_tokens)

    def common(self, resident_tokens: Sequence[int]) -> int:
        """Tokens of a prefix that is of use, given how many are there in each group: the last boundary all reach."""
        if len(resident_tokens) != len(self.source.groups):
            raise ValueError(f"{len(resident_tokens)} residencies for {len(self.source.groups)} groups")
        resident = min(resident_tokens)
        return resident - resident % self.boundary_tokens

    def moves(self, group: str, first: int, end: int) -> Moves:
        """What moves of a group for tokens `first .. end` (exclusive) of a request, `end` being where it goes on.

        Of a `window` the tokens that are still in it at `end`; of a `state` the snapshots of blocks that end in there.
        """
        source, target = self.source.group(group), self.target.group(group)
        if not 0 <= first <= end:
            raise ValueError(f"tokens {first} to {end}")
        if source.kind == "window":
            first = max(first, end - source.window_tokens)
        period = math.lcm(source.block_tokens, target.block_tokens)
        start, last = -(-first // period), end // period
        if start >= last:
            return self._direct(source, target, first, end)
        if group not in self._repeating:
            self._repeating[group] = self._direct(source, target, 0, period)
        times = np.arange(start, last, dtype=np.int64)
        blocks = period // source.block_tokens, period // target.block_tokens
        parts = [
            self._direct(source, target, first, start * period),
            self._repeating[group].shifted(times, *blocks),
            self._direct(source, target, last * period, end),
        ]
        return Moves.together(parts)

    def served(self, group: str) -> list[list[Served]]:
        """For each target rank, what it takes from which of the source's ranks."""
        if group not in self._served:
            self._served[group] = _served(self.source.group(group), self.target.group(group))
        return self._served[group]

    def _direct(self, source: GroupLayout, target: GroupLayout, first: int, end: int) -> Moves:
        encoding, parts = self.source.encoding, list[Moves]()
        convert = source.dtype != target.dtype
        items = (source.number_bytes, target.number_bytes) if convert else (1, 1)
        source_row, target_row = rows(source, target, first, end)
        for rank, entries in enumerate(self.served(source.name)):
            for holder, layers, places in entries:
                here = _places(source, holder, source_row, layers[0], places)
                there = _places(target, rank, target_row, layers[1], places)
                planes = zip(source.planes(holder, encoding), target.planes(rank, encoding), strict=True)
                for (base, nbytes), (target_base, target_nbytes) in planes:
                    same = np.ones_like(here[0])
                    parts.append(
                        Moves(
                            same * holder,
                            here[0],
                            base + here[1] * nbytes,
                            same * rank,
                            there[0],
                            target_base + there[1] * target_nbytes,
                            same * (nbytes // items[0]),
                            *items,
                        )
                    )
        return _coalesced(Moves.together(parts))


def plan(source: Layout, target: Layout) -> Plan:
    """How blocks of `source` become blocks of `target`.

    Raises `LayoutMismatch` with every reason why they cannot: other weights, groups, layers, heads or windows, another
    encoding, dtypes that are not converted, states whose snapshots are of other places.
    """
    problems = _problems(source, target)
    if problems:
        raise LayoutMismatch("; ".join(problems))
    conversions = [
        Conversion(group.name, group.dtype, target.group(group.name).dtype)
        for group in source.groups
        if group.dtype != target.group(group.name).dtype
    ]
    return Plan(source, target, tuple(conversions))


def _problems(source: Layout, target: Layout) -> list[str]:
    if source.fingerprint != target.fingerprint:
        return [f"blocks of model {source.fingerprint[:12]} for one of {target.fingerprint[:12]}"]
    problems: list[str] = []
    if source.encoding != target.encoding:
        problems.append(
            f"encoding {source.encoding} for {target.encoding}: encoded blocks are converted whole, by their memories"
        )
    names = [sorted(group.name for group in layout.groups) for layout in (source, target)]
    if names[0] != names[1]:
        return [*problems, f"KV groups {names[0]} for {names[1]}"]
    for group in source.groups:
        other = target.group(group.name)
        for name in ("kind", "kv_heads", "width", "rope_width", "window_tokens"):
            if getattr(group, name) != getattr(other, name):
                problems.append(f"group {group.name}: {name} {getattr(group, name)} for {getattr(other, name)}")
        if sorted(group.layers) != sorted(other.layers):
            odd = sorted(frozenset(group.layers) ^ frozenset(other.layers))
            problems.append(f"group {group.name}: layers {odd[:4]} are on one side only")
        if source.encoding != "none" and group.dtype != other.dtype:
            problems.append(f"group {group.name}: {group.dtype} for {other.dtype} in encoding {source.encoding}")
        if group.kind == "state" and other.block_tokens % group.block_tokens:
            problems.append(
                f"group {group.name}: snapshots every {group.block_tokens} tokens for every {other.block_tokens}"
            )
        period = math.lcm(group.block_tokens, other.block_tokens)
        ranks = sum(shard.layers * shard.heads for shard in other.shards)
        if period * ranks * group.keys_and_values > MOST_VECTORS:
            problems.append(
                f"group {group.name}: blocks of {group.block_tokens} and {other.block_tokens} tokens meet only every "
                f"{period}"
            )
    return problems


def rows(source: GroupLayout, target: GroupLayout, first: int, end: int) -> tuple[tuple[Column, Column], ...]:
    """`(block, row in it)` of each token on both sides; of a state, of each snapshot that the target has."""
    if source.kind == "state":
        blocks = np.arange(first // target.block_tokens, end // target.block_tokens, dtype=np.int64)
        none = np.zeros_like(blocks)
        return ((blocks + 1) * (target.block_tokens // source.block_tokens) - 1, none), (blocks, none)
    tokens = np.arange(first, end, dtype=np.int64)
    return tuple((tokens // side.block_tokens, tokens % side.block_tokens) for side in (source, target))


def _served(source: GroupLayout, target: GroupLayout) -> list[list[Served]]:
    """Ranks that want the same head ask its holders in turn."""
    names = {name: number for number, name in enumerate(source.layers)}
    counterpart = [names[name] for name in target.layers]
    served: list[list[Served]] = []
    for rank, shard in enumerate(target.shards):
        by_holder: dict[int, list[tuple[int, int, int]]] = {}
        for layer in range(shard.first_layer, shard.last_layer):
            for head in range(shard.first_head, shard.last_head):
                holders = source.holders(counterpart[layer], head)
                holder = holders[rank % len(holders)]
                by_holder.setdefault(holder, []).append((counterpart[layer], layer, head))
        rows: list[Served] = []
        for holder, found in sorted(by_holder.items()):
            there, here, heads = np.array(found, np.int64).T
            rows.append((holder, (there, here), heads))
        served.append(rows)
    return served


def _places(
    group: GroupLayout, rank: int, rows: tuple[Column, Column], layers: Column, heads: Column
) -> tuple[Column, Column]:
    """`(block, number of the vector in it)` of each (layer and head, key or value, token): `[m * kv * T]`."""
    shard, strides = group.shards[rank], group.strides(rank)
    blocks, row = rows
    fixed = (layers - shard.first_layer) * strides["layer"] + (heads - shard.first_head) * strides["head"]
    kv = np.arange(group.keys_and_values, dtype=np.int64) * strides["kv"]
    vectors = fixed[:, None, None] + kv[None, :, None] + (row * strides["token"])[None, None, :]
    return np.broadcast_to(blocks, vectors.shape).reshape(-1), vectors.reshape(-1)


def _coalesced(moves: Moves) -> Moves:
    """In the target's order, what follows its predecessor on both sides joined to it."""
    order = np.lexsort((moves.target_byte, moves.target_block, moves.target_rank))
    columns = [column[order] for column in moves.columns()]
    source_rank, source_block, source_byte, target_rank, target_block, target_byte, count = columns
    follows = np.ones(max(0, len(count) - 1), bool)
    for column in (source_rank, source_block, target_rank, target_block):
        follows &= column[1:] == column[:-1]
    for column, item in ((source_byte, moves.source_item), (target_byte, moves.target_item)):
        follows &= column[1:] == column[:-1] + count[:-1] * item
    if not len(count):
        return moves
    firsts = np.flatnonzero(np.concatenate([[True], ~follows]))
    return moves.with_columns([*(column[firsts] for column in columns[:-1]), np.add.reduceat(count, firsts)])
