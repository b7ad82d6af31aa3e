"""Decode on a GPU: as many blocks as stay on the card at once, each of which takes parts of contexts in turn.

A context is cut into parts, and each part of each key head is one piece of work. How many parts a context has follows
from its own length and from what is known at compile time, so what else is in the batch changes no bit of a row. The
blocks are persistent: piece i is done by block `i modulo blocks`, so however ragged a batch is, all blocks have about
the same to do, and a row without queries costs nothing. Which piece is which each block finds out by itself, from a
running sum over the batch: there is no schedule to be made, and no launch to make it. A second kernel puts the parts of
each query together, as in flash decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

Within a part it is the softmax of Milakov and Gimelshein ("Online normalizer calculation for softmax", 2018), a tile of
keys at a time. All query vectors of a key head, of all its query tokens, are the rows of one product on the tensor
cores. Keys and values come by the page table, token by token, so pages may be of any size; masks make them as wide as
the tensor cores want them, and keep what no query sees from being read at all.

Lowered by Triton, not Mosaic GPU: the same body runs interpreted, and a page of one key head is a few KiB, which
asynchronous copies of 16 bytes a thread bring as well as TMA would (a matter of design: neither was measured).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from mcjax.cost.kernels import AttentionShape, decode_cost
from mcjax.errors import KernelRefused
from mcjax.kernels import compat
from mcjax.kernels.decode.eight_bit import paired, taken_apart, taken_apart_by_assembly
from mcjax.kernels.decode.gpu_plan import Blocks, Plan, rounded_up, tuned
from mcjax.kernels.pages import LARGEST, KVPages
from mcjax.kernels.target import Target

LOG2_E = math.log2(math.e)

LOWEST = -1e30
"""Below all scores, and finite: the difference of two is a number."""


def decode(
    queries: Float[Array, "B Q H D"],
    pages: KVPages,
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B N"],
    contexts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    firsts: Int[Array, " B"] | None = None,
    *,
    target: Target,
    blocks: Blocks | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> tuple[Float[Array, "B Q H D"], Float[Array, "B Q H"]]:
    """As `decode.reference.decode`; `blocks` are tuned ones unless given.

    Products are of bfloat16 numbers (of float32 ones if queries or pages are), in which quantised keys and values are
    exact; scores and sums are float32. Raises `KernelRefused` for other dtypes.
    """
    batch, width, heads, head_dim = queries.shape
    _refuse(pages, queries.dtype)
    groups = heads // pages.kv_heads
    compute_dtype = jnp.float32 if jnp.float32 in (queries.dtype, pages.data.dtype) else jnp.bfloat16
    plan = Plan(
        batch=batch,
        width=width,
        kv_heads=pages.kv_heads,
        groups=groups,
        head_dim=head_dim,
        page_tokens=pages.page_tokens,
        page_vectors=math.prod(pages.data.shape[1:-1]),
        table_tokens=page_table.shape[1] * pages.page_tokens,
        sharded=firsts is not None,
        page_dtype=pages.data.dtype,
        window=window,
        soft_cap=soft_cap,
        scale=head_dim**-0.5 if scale is None else scale,
        compute_dtype=compute_dtype,
        blocks=blocks or tuned(target, head_dim, pages.data.dtype, width * groups, compute_dtype),
        interpret=target.interpret,
    )
    # Nobody looks at what stands for the zeros of `firsts`, which only a kernel of their own could make.
    rows = [array.astype(jnp.int32) for array in (contexts, lengths, lengths if firsts is None else firsts)]
    split = queries.reshape(batch, width, pages.kv_heads, groups, head_dim)
    # Vectors one after the other, whose number has 32 bits, and 64 only the places of what is in them, if so many.
    stored = [(paired(pages.data) if plan.lanes == 2 else pages.data).reshape(-1, head_dim // plan.lanes)]
    if pages.scales is not None:
        stored.append(pages.scales.reshape(-1))
    slots = batch * plan.most_parts * plan.pieces
    partial, peaks = pl.pallas_call(
        functools.partial(_attend, plan, len(stored) == 2),
        grid=(min(plan.blocks.blocks, slots),),
        out_shape=(
            jax.ShapeDtypeStruct((slots, plan.kept_rows, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((slots, plan.kept_rows), jnp.float32),
        ),
        compiler_params=pltriton.CompilerParams(num_warps=plan.blocks.num_warps, num_stages=plan.blocks.num_stages),
        cost_estimate=_cost(plan, queries, pages),
        interpret=target.interpret,
        name="decode_parts",
    )(jnp.asarray(layer, jnp.int32).reshape(1), page_table.astype(jnp.int32), *rows, split, *stored)
    mixed, logs = pl.pallas_call(
        functools.partial(_put_together, plan),
        grid=(width * heads, batch),
        out_shape=(
            jax.ShapeDtypeStruct(split.shape, queries.dtype),
            jax.ShapeDtypeStruct(split.shape[:-1], jnp.float32),
        ),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2),
        interpret=target.interpret,
        name="decode_merge",
    )(*rows, partial, peaks)
    return mixed.reshape(queries.shape), logs.reshape(batch, width, heads)


def _refuse(pages: KVPages, dtype: Any) -> None:
    vectors = math.prod(pages.data.shape[:-1])
    if vectors > 2**31:
        raise KernelRefused("decode", f"{vectors} vectors in one array of pages", "make it at most 2^31")
    allowed = {"float32", "bfloat16", *LARGEST}
    for name in (jnp.dtype(dtype).name, pages.data.dtype.name):
        if name not in allowed:
            raise KernelRefused("decode", f"numbers of {name}", f"use one of {', '.join(sorted(allowed))}")


def _cost(plan: Plan, queries: Array, pages: KVPages) -> pl.CostEstimate:
    """If every row were as long as its table."""
    shape = AttentionShape(
        heads=plan.kv_heads * plan.groups,
        kv_heads=plan.kv_heads,
        head_dim=plan.head_dim,
        page_tokens=plan.page_tokens,
        dtype_bytes=queries.dtype.itemsize,
        kv_dtype_bytes=pages.data.dtype.itemsize,
        scale_bytes=0 if pages.scales is None else 4,
        window=plan.window,
        soft_cap=plan.soft_cap is not None,
    )
    longest = max(plan.table_tokens, plan.width)
    return compat.cost_estimate(decode_cost(shape, [(longest, plan.width)] * plan.batch))


def _pieces_of_rows(plan: Plan, contexts_ref: Any, lengths_ref: Any, firsts_ref: Any) -> Int[Array, " Bp"]:
    """How many pieces of work each row has; `B` up to a power of two, with rows of none."""
    row = jnp.arange(pl.next_power_of_2(plan.batch))
    there = row < plan.batch
    contexts, lengths, firsts = (
        pltriton.load(ref.at[row], mask=there, other=0) for ref in (contexts_ref, lengths_ref, firsts_ref)
    )
    firsts = firsts if plan.sharded else jnp.zeros_like(firsts)
    start, stop = plan.seen(contexts, lengths, firsts)
    return plan.parts(stop - start)[0] * plan.pieces


def _attend(plan: Plan, quantised: bool, layer_ref: Any, table_ref: Any, *refs: Any) -> None:
    """All pieces of one block: refs of [B] contexts, lengths, firsts; queries [B, Q, Hkv, G, D]; pages (and scales).

    Each leaves its result in float32, and the logarithm to base two of its softmax's sum, in the place of its number.
    """
    contexts_ref, lengths_ref, firsts_ref, queries_ref, numbers_ref, *rest = refs
    scales_ref = rest.pop(0) if quantised else None
    partial_ref, logs_ref = rest
    tile, row_tile = plan.blocks.key_tile, plan.row_tile
    block, blocks = pl.program_id(0), pl.num_programs(0)
    layer = layer_ref[0]
    counts = _pieces_of_rows(plan, contexts_ref, lengths_ref, firsts_ref)
    ends = jnp.cumsum(counts)
    total = jnp.sum(counts)
    to_value = plan.kv_heads * plan.page_tokens
    lanes, words = range(plan.lanes), plan.head_dim // plan.lanes
    word = jnp.arange(plan.words)

    def piece(turn: Array, nothing: Array) -> Array:
        index = block + turn * blocks
        done = ends <= index
        row = jnp.sum(done.astype(jnp.int32))
        inside = index - jnp.sum(jnp.where(done, counts, 0))
        rows_from = lax.rem(inside, jnp.int32(plan.row_tiles)) * row_tile
        head = lax.rem(lax.div(inside, jnp.int32(plan.row_tiles)), jnp.int32(plan.kv_heads))
        part = lax.div(inside, jnp.int32(plan.pieces))
        head_from = (layer * 2 * plan.kv_heads + head) * plan.page_tokens
        context, length = contexts_ref[row], lengths_ref[row]
        first = firsts_ref[row] if plan.sharded else jnp.int32(0)
        low, high = plan.seen(context, length, first)
        each = plan.parts(high - low)[1]
        begin = low + part * each
        end = jnp.minimum(begin + each, high)

        vector = rows_from + jnp.arange(row_tile)
        token = lax.div(vector, jnp.full_like(vector, plan.groups))
        group = vector - token * plan.groups
        position = context - length + token - first  # in the table
        valid = (vector < plan.rows) & (token < length)

        def spread(by_row: Array) -> Array:
            return lax.broadcast_in_dim(by_row, (by_row.shape[0], plan.words), (0,))

        def along(rows: int) -> Array:
            return lax.broadcast_in_dim(word, (rows, plan.words), (1,))

        query = [
            pltriton.load(
                queries_ref.at[row, spread(token), head, spread(group), along(row_tile) * plan.lanes + lane],
                mask=spread(valid) & (along(row_tile) < words),
                other=0,
            ).astype(plan.compute_dtype)
            for lane in lanes
        ]

        def pages_at(place: Array) -> Array:
            entry = lax.div(place, jnp.full_like(place, plan.page_tokens))
            return pltriton.load(table_ref.at[row, entry], mask=place < end, other=0)

        def step(index: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            mixed, peak, sums, page = carry
            place = begin + index * tile + jnp.arange(tile)
            there = place < end
            key = page * plan.page_vectors + head_from + lax.rem(place, jnp.full_like(place, plan.page_tokens))
            wanted = spread(there)
            if plan.words != words:
                wanted &= along(tile) < words

            def numbers(vector: Array) -> list[Array]:
                at = numbers_ref.at[spread(vector), along(tile)]
                found = pltriton.load(at, mask=wanted, other=jnp.zeros((), numbers_ref.dtype))
                return _lanes(plan, found)

            def scales(vector: Array) -> Array:
                assert scales_ref is not None
                return pltriton.load(scales_ref.at[vector], mask=there, other=0)[None]

            scores = sum(_product(plan, left, right, 1) for left, right in zip(query, numbers(key)))
            if quantised:
                scores = scores * scales(key)
            if plan.soft_cap is None:
                scores = scores * (plan.scale * LOG2_E)
            else:
                scores = jnp.tanh(scores * (plan.scale / plan.soft_cap)) * (plan.soft_cap * LOG2_E)
            visible = there[None] & (place[None] <= position[:, None])
            if plan.window is not None:
                visible &= place[None] > position[:, None] - plan.window
            scores = jnp.where(visible, scores, -jnp.inf)
            higher = jnp.maximum(peak, scores.max(axis=1))
            shrink = jnp.exp2(peak - higher)
            weights = jnp.exp2(scores - higher[:, None])
            sums = sums * shrink + weights.sum(axis=1)
            if quantised:
                weights = weights * scales(key + to_value)
            weights = weights.astype(plan.compute_dtype)
            mixed = tuple(
                lane * shrink[:, None] + _product(plan, weights, values, 0)
                for lane, values in zip(mixed, numbers(key + to_value))
            )
            # A step ahead, so that the compiler can have keys on their way for as many steps as there are stages.
            return mixed, higher, sums, pages_at(place + tile)

        empty = (
            tuple(jnp.zeros((row_tile, plan.words), jnp.float32) for _ in lanes),
            jnp.full((row_tile,), LOWEST, jnp.float32),
            jnp.zeros((row_tile,), jnp.float32),
            pages_at(begin + jnp.arange(tile)),
        )
        mixed, peak, sums, _ = lax.fori_loop(0, rounded_up(end - begin, tile), step, empty)
        within = jnp.arange(row_tile)
        kept = vector < plan.rows
        for lane in lanes:
            pltriton.store(
                partial_ref.at[index, spread(within), along(row_tile) * plan.lanes + lane],
                mixed[lane] / jnp.maximum(sums, 1e-37)[:, None],
                mask=spread(kept) & (along(row_tile) < words),
            )
        logs = jnp.where(valid & (sums > 0), peak + jnp.log2(sums), -jnp.inf)
        pltriton.store(logs_ref.at[index, within], logs, mask=kept)
        return nothing

    turns = jnp.maximum(rounded_up(total - block, blocks), 0)
    lax.fori_loop(0, turns, piece, jnp.int32(0))


def _lanes(plan: Plan, words: Array) -> list[Array]:
    """The numbers of words: the first one of each, and where there are two the second ones."""
    if plan.lanes == 1:
        return [words.astype(plan.compute_dtype)]
    if plan.interpret or plan.compute_dtype == jnp.float32:
        return [numbers.astype(plan.compute_dtype) for numbers in taken_apart(words, plan.page_dtype)]
    return list(taken_apart_by_assembly(words, plan.page_dtype))


def _product(plan: Plan, left: Array, right: Array, axis: int) -> Array:
    """Float32 sums over the last axis of `left` and that one of `right`."""
    precision = lax.Precision.HIGHEST if plan.compute_dtype == jnp.float32 else None
    numbers = (((1,), (axis,)), ((), ()))
    return lax.dot_general(left, right, numbers, precision, preferred_element_type=jnp.float32)


def _put_together(
    plan: Plan,
    contexts_ref: Any,
    lengths_ref: Any,
    firsts_ref: Any,
    partial_ref: Any,
    peaks_ref: Any,
    mixed_ref: Any,
    logs_ref: Any,
) -> None:
    """One query vector's parts: `merge` of a number of them that only the device knows."""
    heads = plan.kv_heads * plan.groups
    row = pl.program_id(1)
    token = lax.div(pl.program_id(0), heads)
    query_head = pl.program_id(0) - token * heads
    head = lax.div(query_head, plan.groups)
    group = query_head - head * plan.groups
    vector = token * plan.groups + group
    row_tile = lax.div(vector, plan.row_tile)
    within = vector - row_tile * plan.row_tile

    counts = _pieces_of_rows(plan, contexts_ref, lengths_ref, firsts_ref)
    before = jnp.sum(jnp.where(jnp.arange(counts.shape[0]) < row, counts, 0))
    first = firsts_ref[row] if plan.sharded else jnp.int32(0)
    low, high = plan.seen(contexts_ref[row], lengths_ref[row], first)
    parts = plan.parts(high - low)[0]

    def logs_of(part: Array) -> tuple[Array, Array]:
        slot = before + (part * plan.kv_heads + head) * plan.row_tiles + row_tile
        return slot, pltriton.load(peaks_ref.at[slot, within], mask=part < parts, other=-jnp.inf)

    every = logs_of(jnp.arange(pl.next_power_of_2(plan.most_parts)))[1]
    peak = jnp.maximum(every.max(), LOWEST)
    total = jnp.exp2(every - peak).sum()
    dims = pl.next_power_of_2(plan.head_dim)
    dim = jnp.arange(dims)
    at_once = min(pl.next_power_of_2(plan.most_parts), max(1024 // dims, 1))

    def step(index: Array, mixed: Array) -> Array:
        part = index * at_once + jnp.arange(at_once)
        slot, logs = logs_of(part)
        shares = jnp.exp2(logs - peak)
        shape = (at_once, dims)
        slots, place, share = (
            lax.broadcast_in_dim(array, shape, axes) for array, axes in ((slot, (0,)), (dim, (1,)), (shares, (0,)))
        )
        counted = (share > 0) & (place < plan.head_dim)
        values = pltriton.load(partial_ref.at[slots, within, place], mask=counted, other=0)
        return mixed + (values * share).sum(axis=0)

    mixed = lax.fori_loop(0, rounded_up(parts, at_once), step, jnp.zeros((dims,), jnp.float32))
    mixed = mixed / jnp.maximum(total, 1e-37)
    pltriton.store(mixed_ref.at[row, token, head, group, dim], mixed.astype(mixed_ref.dtype), mask=dim < plan.head_dim)
    logs_ref[row, token, head, group] = jnp.where(total > 0, (peak + jnp.log2(total)) / LOG2_E, -jnp.inf)
