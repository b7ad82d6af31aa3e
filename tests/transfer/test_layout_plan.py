"""Resharding: what arrives is what the target's layout says when it is written down directly."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcjax.errors import LayoutMismatch, Unencodable
from mcjax.transfer.layout.describe import ORDER, GroupLayout, Layout, tensor_shards, whole
from mcjax.transfer.layout.placed import Blocks, Placed, flat, pulls
from mcjax.transfer.layout.plan import Plan, plan
from mcjax.transfer.layout.staged import Memories, apply, pack, pairs, staged_bytes, unpack

NUMPY: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
UNWRITTEN = 0xA5


def logical(group: GroupLayout, tokens: int, seed: int = 0) -> NDArray[Any]:
    """`[layers, kv, tokens, heads, width]` float32: the numbers that a request has, none of them twice."""
    shape = (len(group.layers), group.keys_and_values, tokens, group.kv_heads, group.width)
    count = math.prod(shape)
    words = np.random.default_rng(seed).permutation(count).astype(np.float32)
    return (words / 8 - count / 16).reshape(shape)


def written(group: GroupLayout, rank: int, numbers: NDArray[Any], encoding: str) -> NDArray[np.uint8]:
    """`[blocks, block_bytes]`: the blocks of one rank, from the layout's definition, with loops and no offsets."""
    shard, size = group.shards[rank], group.block_tokens
    tokens = numbers.shape[2]
    blocks = -(-tokens // size)
    out = np.full((blocks, group.block_bytes(rank, encoding)), UNWRITTEN, np.uint8)
    mine = numbers[shard.first_layer : shard.last_layer, :, :, shard.first_head : shard.last_head]
    for block in range(blocks):
        if group.kind == "state":
            if (block + 1) * size > tokens:
                continue
            part = mine[:, :, (block + 1) * size - 1 : (block + 1) * size]
        else:
            part = mine[:, :, block * size : (block + 1) * size]
            room = size - part.shape[2]
            part = np.pad(part, [(0, 0), (0, 0), (0, room), (0, 0), (0, 0)], constant_values=np.nan)
        ordered = part.transpose([*(ORDER.index(axis) for axis in group.order), 4])
        vectors = ordered.reshape(-1, group.width)
        gone = np.isnan(vectors).all(axis=1)
        if encoding == "none":
            rows = np.ascontiguousarray(vectors.astype(NUMPY[group.dtype])).view(np.uint8).reshape(len(vectors), -1)
            rows[gone] = UNWRITTEN
            out[block] = rows.reshape(-1)
        else:  # any scales and bytes that say whose they are
            with np.errstate(invalid="ignore"):
                scales = np.ascontiguousarray(vectors[:, :1].astype(np.float32)).view(np.uint8)
                bytes_ = (vectors * 8).astype(np.int64).astype(np.uint8)
            scales[gone], bytes_[gone] = UNWRITTEN, UNWRITTEN
            out[block] = np.concatenate([scales.reshape(-1), bytes_.reshape(-1)])
    return out


def layers_from(group: GroupLayout, other: GroupLayout, numbers: NDArray[Any]) -> NDArray[Any]:
    """The same numbers, layers in the order of `other`."""
    return numbers[[group.layers.index(name) for name in other.layers]]


def shuffled(blocks: NDArray[np.uint8], seed: int, padding: int) -> Placed:
    """Blocks in slots anywhere, with room between them."""
    count, nbytes = blocks.shape
    slots = np.random.default_rng(seed).permutation(count + 2)[:count].astype(np.int64)
    buffer = np.full((count + 2) * (nbytes + padding) + 5, UNWRITTEN, np.uint8)
    place = Placed(buffer, Blocks(slots, nbytes + padding, 5))
    for slot, block in zip(slots.tolist(), blocks, strict=True):
        start = 5 + slot * (nbytes + padding)
        buffer[start : start + nbytes] = block
    return place


def read_back(place: Placed, nbytes: int) -> NDArray[np.uint8]:
    starts = place.blocks.start_bytes + place.blocks.slots * place.blocks.stride_bytes
    return np.stack([place.buffer[start : start + nbytes] for start in starts.tolist()])


def check(source: Layout, target: Layout, tokens: int, first: int = 0) -> Plan:
    """Carry out a plan and compare every byte of every target rank, of the room between blocks too."""
    found = plan(source, target)
    sources: dict[tuple[str, int], Placed] = {}
    targets: dict[tuple[str, int], Placed] = {}
    wanted: dict[tuple[str, int], NDArray[np.uint8]] = {}
    for index, group in enumerate(source.groups):
        other = target.group(group.name)
        numbers = logical(group, tokens, index)
        if group.dtype != other.dtype or group.dtype == "bfloat16":
            numbers = numbers.astype(NUMPY[group.dtype]).astype(np.float32)
        there = layers_from(group, other, numbers).copy()
        start = max(first, tokens - group.window_tokens) if group.kind == "window" else first
        if group.kind != "state":
            there[:, :, :start] = np.nan
        for rank in range(source.ranks):
            sources[group.name, rank] = shuffled(written(group, rank, numbers, source.encoding), rank, 7)
        for rank in range(target.ranks):
            wanted[group.name, rank] = written(other, rank, there, target.encoding)
            if group.kind == "state":
                wanted[group.name, rank][: first // other.block_tokens] = UNWRITTEN
            empty = np.full_like(wanted[group.name, rank], UNWRITTEN)
            targets[group.name, rank] = shuffled(empty, 99 - rank, 3)
    before = {key: place.buffer.copy() for key, place in sources.items()}
    total = apply(found, sources, targets, first, tokens)
    for (name, rank), blocks in wanted.items():
        place = targets[name, rank]
        assert (read_back(place, blocks.shape[1]) == blocks).all(), (name, rank)
        inside = np.zeros(len(place.buffer), bool)
        starts = place.blocks.start_bytes + place.blocks.slots * place.blocks.stride_bytes
        for start in starts.tolist():
            inside[start : start + blocks.shape[1]] = True
        assert (place.buffer[~inside] == UNWRITTEN).all()
    assert all((place.buffer == before[key]).all() for key, place in sources.items())
    once(found, tokens, first, total)
    by_way_of_staging(found, sources, targets, first, tokens)
    return found


def by_way_of_staging(found: Plan, sources: Memories, targets: Memories, first: int, tokens: int) -> None:
    """Packed for each rank on one side and unpacked on the other, the same comes out."""
    again = {key: Placed(np.full_like(place.buffer, UNWRITTEN), place.blocks) for key, place in targets.items()}
    for group in found.source.groups:
        total = 0
        for source, target in pairs(found, group.name):
            what = (found, group.name, source, target, first, tokens)
            nbytes = staged_bytes(*what)
            staging = np.zeros(nbytes + 3, np.uint8)[3:]  # begins anywhere
            pack(*what, sources[group.name, source], staging)
            unpack(*what, staging, again[group.name, target])
            total += nbytes
        assert total == found.moves(group.name, first, tokens).read_bytes
    assert all((again[key].buffer == place.buffer).all() for key, place in targets.items())


def once(found: Plan, tokens: int, first: int, total: int) -> None:
    """Every byte of the target is written once, and nothing is read beyond a block."""
    counted = 0
    for group in found.source.groups:
        other = found.target.group(group.name)
        moves = found.moves(group.name, first, tokens)
        for rank in range(found.target.ranks):
            mine = moves.chosen(moves.target_rank == rank)
            nbytes = other.block_bytes(rank, found.target.encoding)
            hits = np.zeros((-(-tokens // other.block_tokens) * nbytes) + 1, np.int64)
            begin = mine.target_block * nbytes + mine.target_byte
            np.add.at(hits, begin, 1)
            np.add.at(hits, begin + mine.count * mine.target_item, -1)
            depth = np.cumsum(hits)
            assert depth.max(initial=0) <= 1
            counted += int(depth.sum())
            assert (mine.target_byte + mine.count * mine.target_item <= nbytes).all()
        for rank in range(found.source.ranks):
            mine = moves.chosen(moves.source_rank == rank)
            assert (mine.source_byte >= 0).all()
            nbytes = group.block_bytes(rank, found.source.encoding)
            assert (mine.source_byte + mine.count * mine.source_item <= nbytes).all()
            assert (mine.source_block < -(-tokens // group.block_tokens)).all()
    assert counted == total


def one(kv_heads: int, tensor: int, block_tokens: int = 4, **more: Any) -> Layout:
    """A layout of one group; `layers`, `dtype`, `kind`, `order`, `encoding`, `whole`, `stages` as given."""
    layers, stages = more.pop("layers", ("0", "1")), more.pop("stages", 1)
    kind, encoding = more.get("kind", "full"), more.pop("encoding", "none")
    shards = tensor_shards(len(layers), kv_heads, tensor, kind=kind, whole=more.pop("whole", False), stages=stages)
    values = {"name": "g", "kind": kind, "width": 4, "dtype": "float32", **more}
    group = GroupLayout(layers=layers, kv_heads=kv_heads, block_tokens=block_tokens, shards=shards, **values)
    return Layout("weights", (group,), encoding)


def goes(kv_heads: int, tensor: int) -> bool:
    return kv_heads % tensor == 0 or tensor % kv_heads == 0


@pytest.mark.parametrize("kv_heads", range(1, 9))
def test_every_pair_of_meshes_or_a_refusal(kv_heads: int) -> None:
    for tensor in range(1, 9):
        if not goes(kv_heads, tensor):
            with pytest.raises(LayoutMismatch, match="do not go into"):
                one(kv_heads, tensor)
    sizes = [tensor for tensor in range(1, 9) if goes(kv_heads, tensor)]
    for source, target in itertools.product(sizes, sizes):
        check(one(kv_heads, source, 4), one(kv_heads, target, 3), 13)


MESHES = st.integers(1, 8).flatmap(
    lambda heads: st.tuples(
        st.just(heads),
        *2 * [st.sampled_from([size for size in range(1, 9) if goes(heads, size)])],
    )
)
DTYPES = st.sampled_from(sorted(NUMPY))


@settings(max_examples=80, deadline=None)
@given(
    mesh=MESHES,
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    orders=st.tuples(st.permutations(ORDER), st.permutations(ORDER)),
    dtypes=st.tuples(DTYPES, DTYPES),
    layers=st.permutations(["0", "1", "attention", "3"]),
    stages=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    replicas=st.tuples(st.booleans(), st.booleans()),
    tokens=st.integers(1, 40),
    first=st.integers(0, 20),
)
def test_full_attention(mesh, sizes, orders, dtypes, layers, stages, replicas, tokens, first) -> None:
    heads, *tensors = mesh
    ordered = (("0", "1", "attention", "3"), tuple(layers))
    source, target = (
        one(
            heads,
            tensors[side],
            sizes[side],
            order=tuple(orders[side]),
            dtype=dtypes[side],
            layers=ordered[side],
            stages=stages[side],
            whole=replicas[side],
            width=2,
        )
        for side in (0, 1)
    )
    check(source, target, tokens, min(first, tokens))


@settings(max_examples=60, deadline=None)
@given(
    tensors=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    dtypes=st.tuples(DTYPES, DTYPES),
    tokens=st.integers(1, 40),
)
def test_a_latent_is_on_every_rank(tensors, sizes, dtypes, tokens) -> None:
    source, target = (
        one(1, tensors[side], sizes[side], kind="latent", rope_width=2, width=6, dtype=dtypes[side]) for side in (0, 1)
    )
    found = check(source, target, tokens)
    moves = found.moves("g", 0, tokens)
    asked = len(np.unique(moves.source_rank))
    assert asked == min(tensors)  # who has it is asked in turn


@settings(max_examples=60, deadline=None)
@given(mesh=MESHES, encoding=st.sampled_from(["int8", "fp8"]), sizes=st.tuples(*2 * [st.integers(1, 6)]))
def test_encoded_blocks_move_their_scales_with_their_numbers(mesh, encoding, sizes) -> None:
    heads, source, target = mesh
    check(one(heads, source, sizes[0], encoding=encoding), one(heads, target, sizes[1], encoding=encoding), 17)


@settings(max_examples=80, deadline=None)
@given(
    mesh=MESHES,
    sizes=st.tuples(*4 * [st.integers(1, 6)]),
    window=st.integers(1, 20),
    state=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    tokens=st.integers(1, 40),
    first=st.integers(0, 40),
)
def test_a_hybrid_of_full_window_and_state(mesh, sizes, window, state, tokens, first) -> None:
    heads, *tensors = mesh
    layouts: list[Layout] = []
    for side in (0, 1):
        shards = tensor_shards(2, heads, tensors[side])
        every = state[0] * (state[1] if side else 1)
        layouts.append(
            Layout(
                "weights",
                (
                    GroupLayout("full", "full", ("0", "2"), heads, 2, sizes[side], "float32", shards),
                    GroupLayout(
                        "window", "window", ("1", "3"), heads, 2, sizes[2 + side], "float16", shards, 0, window
                    ),
                    GroupLayout("state", "state", ("4", "5"), heads, 6, every, "float32", shards),
                ),
            )
        )
    source, target = layouts
    found = check(source, target, tokens, min(first, tokens))
    boundary = math.lcm(*sizes, state[0] * state[1])
    assert found.boundary_tokens == boundary
    assert found.common([100, 90, 80]) == 80 // boundary * boundary


def test_blocks_of_one_layout_move_as_wholes() -> None:
    layout = whole("weights", 4, 8, 16, 32, "bfloat16")
    found = plan(layout, layout)
    assert found.straight
    moves = found.moves("full", 0, 128)
    assert moves.count.tolist() == [layout.groups[0].block_bytes(0)] * 4


def test_a_long_prompt_repeats_what_a_stretch_does() -> None:
    source, target = one(8, 2, 16), one(8, 4, 48)
    found = plan(source, target)
    long = found.moves("g", 0, 4800)
    direct = found._direct(source.groups[0], target.groups[0], 0, 4800)
    for one_column, other in zip(sorted_rows(long), sorted_rows(direct), strict=True):
        assert (one_column == other).all()


def sorted_rows(moves) -> NDArray[np.int64]:
    rows = np.stack(moves.columns())
    return rows[:, np.lexsort((moves.target_byte, moves.target_block, moves.target_rank))]


def test_what_a_rank_reads_goes_straight_into_place_or_through_staging() -> None:
    for dtype, staged in (("float32", False), ("bfloat16", True)):
        source, target = one(8, 4, 4), one(8, 2, 6, dtype=dtype)
        found, group = plan(source, target), source.groups[0]
        numbers = logical(group, 24)
        regions = {rank: shuffled(written(group, rank, numbers, "none"), rank, 0) for rank in range(4)}
        for rank in range(2):
            wanted = written(target.groups[0], rank, numbers, "none")
            place = shuffled(np.full_like(wanted, UNWRITTEN), rank, 0)
            ways = pulls(found, "g", rank, 0, 24, {r: p.blocks for r, p in regions.items()}, place.blocks)
            assert [way.source_rank for way in ways] == [2 * rank, 2 * rank + 1]  # nobody else is asked
            for way in ways:
                assert bool(way.staged_bytes) == staged
                into = np.zeros(way.staged_bytes, np.uint8) if staged else place.buffer
                rows = zip(*(column.tolist() for column in (way.spans.local, way.spans.remote, way.spans.nbytes)))
                assert not len(way.spans.outside(len(into), len(regions[way.source_rank].buffer)))
                for local, remote, nbytes in rows:
                    read = regions[way.source_rank].buffer[remote : remote + nbytes]
                    into[local : local + nbytes] = read
                way.finish(into, place.buffer)
            assert (read_back(place, wanted.shape[1]) == wanted).all()


def test_a_block_that_is_not_there_is_refused_before_anything_moves() -> None:
    layout = one(2, 1)
    found = plan(layout, one(2, 1, 8))
    source, target = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    for slots, problem in (([0], "block 1 of 1"), ([0, -1], "block 1 is wanted, and not there")):
        here = Placed(source, Blocks(np.array(slots), 64))
        there = Placed(target, Blocks(np.array([0]), 1024))
        with pytest.raises(LayoutMismatch, match=problem):
            apply(found, {("g", 0): here}, {("g", 0): there}, 0, 8)
    beyond = Placed(source, Blocks(np.array([0, 1 << 40]), 64))
    with pytest.raises(LayoutMismatch, match="block 1 lies outside a region of 4096 bytes"):
        apply(found, {("g", 0): beyond}, {("g", 0): there}, 0, 8)
    assert not target.any()


def test_rounding_is_declared_and_nan_stays() -> None:
    pairs = [(a, b) for a in NUMPY for b in NUMPY]
    loose = {(a, b) for a, b in pairs if plan(one(1, 1, dtype=a), one(1, 1, dtype=b)).lossy}
    assert loose == {(a, b) for a, b in pairs if a != b} - {("bfloat16", "float32"), ("float16", "float32")}
    found = plan(one(1, 1, dtype="float32"), one(1, 1, dtype="bfloat16"))
    (step,) = found.conversions
    assert (step.source, step.target, step.lossy) == ("float32", "bfloat16", True)
    moves = found.moves("g", 0, 4)
    assert (moves.read_bytes, moves.written_bytes) == (4 * 2 * 2 * 4 * 4, 4 * 2 * 2 * 4 * 2)


def test_a_number_too_large_for_the_target_is_refused() -> None:
    source, target = one(1, 1, dtype="float32", layers=("0",)), one(1, 1, dtype="float16", layers=("0",))
    block = np.full((1, source.groups[0].block_bytes(0) // 4), 1e6, np.float32)
    here = Placed(block.reshape(-1).view(np.uint8), Blocks(np.array([0]), 0))
    there = Placed(np.zeros(4096, np.uint8), Blocks(np.array([0]), 0))
    with pytest.raises(Unencodable, match="too large for float16"):
        apply(plan(source, target), {("g", 0): here}, {("g", 0): there}, 0, 4)


BASE = one(4, 2)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (dataclasses.replace(BASE, fingerprint="others"), "model weights for one of others"),
        (one(4, 2, encoding="int8"), "encoding none for int8"),
        (one(8, 2), "kv_heads 4 for 8"),
        (one(4, 2, width=8), "width 4 for 8"),
        (one(4, 2, kind="window", window_tokens=4), "kind full for window"),
        (one(4, 2, layers=("0", "2")), r"layers \['1', '2'\] are on one side only"),
        (one(4, 2, name="other"), r"KV groups \['g'\] for \['other'\]"),
        (one(4, 2, 16_777_213), "meet only every"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(other: Layout, reason: str) -> None:
    with pytest.raises(LayoutMismatch, match=reason):
        plan(BASE, other)


def test_all_reasons_are_given_at_once() -> None:
    with pytest.raises(LayoutMismatch, match="kv_heads 4 for 8; group g: width 4 for 16"):
        plan(BASE, one(8, 2, width=16))


def test_states_are_not_invented_between_snapshots() -> None:
    with pytest.raises(LayoutMismatch, match="snapshots every 4 tokens for every 6"):
        plan(one(2, 1, 4, kind="state"), one(2, 1, 6, kind="state"))


def test_a_store_with_room_between_its_slots_is_a_region() -> None:
    padded = np.arange(40, dtype=np.uint8).reshape(4, 10)[:, :6]
    assert flat(padded).tolist() == list(range(36))
    assert len(flat(padded[:0])) == 0
