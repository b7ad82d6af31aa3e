"""Decode on a TPU: pages come by asynchronous copies while the pages before them are worked on.

One step of the grid is a row and a split of its context. A block is several pages; each page, with all its key heads,
is one contiguous piece of memory and one copy. Two blocks have room: one is worked on, the next is on its way, and with
a row's last block the next row's first is, so short contexts do not wait for memory either. Softmax runs over the
blocks (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"); several splits of a context are put
together by `merge` (as in flash decoding).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from mcjax.cost.kernels import AttentionShape, KernelCost, decode_cost
from mcjax.kernels import compat
from mcjax.kernels.decode.merge import merge
from mcjax.kernels.pages import KVPages
from mcjax.kernels.target import Target
from mcjax.kernels.tuning import tuning
from mcjax.kernels.vmem import require_vmem, tiled_bytes

LANES = 128
UNROLLED = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What of one call is known when it is compiled."""

    width: int
    """Query tokens a row."""
    groups: int
    """Query heads of one key head."""
    rows: int
    """Query vectors of one key head, `width * groups`, padded."""
    kv_heads: int
    head_dim: int
    page_tokens: int
    block_pages: int
    batch: int
    window: int | None
    soft_cap: float | None
    scale: float
    quantised: bool
    compute_dtype: Any
    """Of the products: bfloat16 unless queries or pages are float32."""

    @property
    def block_tokens(self) -> int:
        return self.block_pages * self.page_tokens


def decode(
    queries: Float[Array, "B Q H D"],
    pages: KVPages,
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B N"],
    contexts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    firsts: Int[Array, " B"] | None = None,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    target: Target,
    block_pages: int | None = None,
    splits: int | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B Q H D"], Float[Array, "B Q H"]]:
    """As `decode.reference.decode`, with blocks of `block_pages` pages and each context in `splits` parts.

    What is not said is as `tuning_tpu.json` has it. `interpret` says how the body is interpreted, if not as `target`
    has it. Raises `KernelRefused` where a core of `target.kind` has not the VMEM for two such blocks.

    Products are of bfloat16 numbers with float32 sums (softmax weights are rounded to bfloat16 before they meet the
    values), or of float32 numbers where queries or pages are float32. On a TPU the pages must lie as `KVPages.formats`
    has it.
    """
    batch, width, heads, head_dim = queries.shape
    kv_heads, page = pages.kv_heads, pages.page_tokens
    groups = heads // kv_heads
    wide = jnp.float32 in (queries.dtype, pages.data.dtype)
    page_bytes = 2 * kv_heads * page * -(-head_dim // LANES) * LANES * pages.data.dtype.itemsize  # lanes are padded
    tuned = tuning("mcjax.kernels.decode", "tuning_tpu.json").find(
        kind=target.kind, kv_dtype_bytes=pages.data.dtype.itemsize
    )
    if block_pages is None:
        block_pages = max(1, tuned["block_bytes"] // page_bytes)
    splits = splits or tuned["splits"]
    plan = Plan(
        width=width,
        groups=groups,
        rows=-(-width * groups // 8) * 8,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_tokens=page,
        block_pages=min(block_pages, page_table.shape[1]),
        batch=batch,
        window=window,
        soft_cap=soft_cap,
        scale=head_dim**-0.5 if scale is None else scale,
        quantised=pages.scales is not None,
        compute_dtype=jnp.float32 if wide else jnp.bfloat16,
    )
    if firsts is None:
        firsts = jnp.zeros_like(contexts)
    begins, counts, follows, leads = _work(plan, page_table.shape[1], splits, contexts, lengths, firsts)
    grouped = queries.reshape(batch, width, kv_heads, groups, head_dim).transpose(0, 2, 1, 3, 4)
    grouped = grouped.reshape(batch, kv_heads, width * groups, head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, plan.rows - width * groups), (0, 0)))
    mixed_dtype = queries.dtype if splits == 1 else jnp.float32
    log_lanes = -(-plan.rows // LANES) * LANES

    def of_row(split: Array, row: Array, *_: Any) -> tuple[Any, ...]:
        return row, 0, 0, 0

    def of_split(split: Array, row: Array, *_: Any) -> tuple[Any, ...]:
        return split, row, 0, 0, 0

    def next_table(split: Array, row: Array, layer: Any, follows: Any, *_: Any) -> tuple[Any, ...]:
        return jnp.minimum(follows[split * batch + row], batch - 1), 0, 0

    table = pl.BlockSpec((1, 1, page_table.shape[1]), lambda split, row, *_: (row, 0, 0), memory_space=pltpu.SMEM)
    following = pl.BlockSpec((1, 1, page_table.shape[1]), next_table, memory_space=pltpu.SMEM)
    stored = [pages.data] if pages.scales is None else [pages.data, pages.scales]
    buffers = [pltpu.VMEM((2, plan.block_pages, *array.shape[2:]), array.dtype) for array in stored]
    tables = page_table.astype(jnp.int32)[:, None]
    mixed, logs = pl.pallas_call(
        functools.partial(_body, plan),
        out_shape=(
            jax.ShapeDtypeStruct((splits, batch, kv_heads, plan.rows, head_dim), mixed_dtype),
            jax.ShapeDtypeStruct((splits, batch, kv_heads, 1, log_lanes), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=8,
            grid=(splits, batch),
            in_specs=[
                table,
                following,
                pl.BlockSpec((1, kv_heads, plan.rows, head_dim), of_row),
                *(pl.BlockSpec(memory_space=pl.ANY) for _ in stored),
            ],
            out_specs=(
                pl.BlockSpec((1, 1, kv_heads, plan.rows, head_dim), of_split),
                pl.BlockSpec((1, 1, kv_heads, 1, log_lanes), of_split),
            ),
            scratch_shapes=[
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((kv_heads, plan.rows, 1), jnp.float32),
                pltpu.VMEM((kv_heads, plan.rows, 1), jnp.float32),
                pltpu.VMEM((kv_heads, plan.rows, head_dim), jnp.float32),
                *([pltpu.VMEM((2, kv_heads, plan.block_tokens), jnp.float32)] if plan.quantised else []),
                *buffers,
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=_vmem(plan, stored, queries.dtype, mixed_dtype, target),
        ),
        cost_estimate=compat.cost_estimate(_most(plan, pages, queries, page_table.shape[1])),
        interpret=target.interpret if interpret is None else interpret,
        name="decode",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        follows,
        leads,
        begins,
        counts,
        contexts.astype(jnp.int32),
        lengths.astype(jnp.int32),
        firsts.astype(jnp.int32),
        tables,
        tables,
        grouped,
        *stored,
    )
    logs = logs[:, :, :, 0, : plan.rows]
    if splits == 1:
        mixed, logs = mixed[0], logs[0]
    else:
        mixed, logs = merge(mixed, logs)
    mixed = mixed[:, :, : width * groups].reshape(batch, kv_heads, width, groups, head_dim)
    logs = logs[:, :, : width * groups].reshape(batch, kv_heads, width, groups)
    mixed = mixed.transpose(0, 2, 1, 3, 4).reshape(queries.shape).astype(queries.dtype)
    return mixed, logs.transpose(0, 2, 1, 3).reshape(batch, width, heads)


def _work(
    plan: Plan,
    table_pages: int,
    splits: int,
    contexts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    firsts: Int[Array, " B"],
) -> tuple[Array, Array, Array, Array]:
    """Of each split and row, flat: the first page of the table to work on, how many, and which row of the split has
    work next (`B` if none has); and of each split, which row is the first with work."""
    page = plan.page_tokens
    stops = jnp.clip(-(-(contexts - firsts) // page), 0, table_pages)
    begins = jnp.zeros_like(stops)
    if plan.window is not None:
        begins = jnp.clip((contexts - lengths - plan.window + 1 - firsts) // page, 0, stops)
    totals = jnp.where(lengths > 0, stops - begins, 0)
    part = -(-totals // (splits * plan.block_pages)) * plan.block_pages  # whole blocks
    offsets = jnp.minimum(part * jnp.arange(splits)[:, None], totals)
    counts = jnp.minimum(totals - offsets, part)  # [splits, B]
    index = jnp.where(counts > 0, jnp.arange(plan.batch), plan.batch)
    ahead = jax.lax.cummin(index, axis=1, reverse=True)  # the first row with work from here on
    follows = jnp.concatenate([ahead[:, 1:], jnp.full((splits, 1), plan.batch)], axis=1)
    flat = (array.astype(jnp.int32).reshape(-1) for array in (begins + offsets, counts, follows, ahead[:, 0]))
    return tuple(flat)  # type: ignore[return-value]


def _body(plan: Plan, *refs: Any) -> None:
    layer, follows, leads, begins, counts, contexts, lengths, firsts = refs[:8]
    table, next_table, queries = refs[8:11]
    stored = 2 if plan.quantised else 1
    sources, buffers = refs[11 : 11 + stored], refs[-stored:]
    mixed, logs, turn, arrived, peak, total, summed, *in_rows = refs[11 + stored : -stored]
    split, row = pl.program_id(0), pl.program_id(1)
    work = split * plan.batch + row
    count, context, length = counts[work], contexts[row], lengths[row]

    def copies(slot: Any, place: Any, page: Any) -> list[Any]:
        return [
            pltpu.make_async_copy(source.at[page, layer[0]], buffer.at[slot, place], arrived.at[slot])
            for source, buffer in zip(sources, buffers)
        ]

    def start(table: Any, begin: Any, pages: Any, slot: Any) -> None:
        def one(place: Any, _: None) -> None:
            for copy in copies(slot, place, table[0, 0, begin + place]):
                copy.start()

        jax.lax.fori_loop(0, pages, one, None)

    def wait(pages: Any, slot: Any) -> None:
        def one(place: Any, _: None) -> None:
            for copy in copies(slot, place, 0):
                copy.wait()

        jax.lax.fori_loop(0, pages, one, None)

    @pl.when(count == 0)
    def _() -> None:
        mixed[...] = jnp.zeros_like(mixed)
        logs[...] = jnp.full_like(logs, -jnp.inf)

    @pl.when(count > 0)
    def _() -> None:
        begin = begins[work]
        stop = firsts[row] + (begin + count) * plan.page_tokens  # position after the last key here

        @pl.when(leads[split] == row)
        def _() -> None:
            turn[0] = 0
            start(table, begin, jnp.minimum(count, plan.block_pages), 0)

        peak[...] = jnp.full_like(peak, -jnp.inf)
        total[...] = jnp.zeros_like(total)
        summed[...] = jnp.zeros_like(summed)
        blocks = pl.cdiv(count, plan.block_pages)

        def block(number: Any, slot: Any) -> Any:
            here = jnp.minimum(count - number * plan.block_pages, plan.block_pages)
            after = begin + (number + 1) * plan.block_pages

            @pl.when(number + 1 < blocks)
            def _() -> None:
                start(table, after, jnp.minimum(begin + count - after, plan.block_pages), 1 - slot)

            @pl.when((number + 1 == blocks) & (follows[work] < plan.batch))
            def _() -> None:
                other = split * plan.batch + follows[work]
                start(next_table, begins[other], jnp.minimum(counts[other], plan.block_pages), 1 - slot)

            wait(here, slot)
            first = firsts[row] + (begin + number * plan.block_pages) * plan.page_tokens
            whole = first + plan.block_tokens <= jnp.minimum(stop, context - length + 1)
            if plan.window is not None:
                whole &= first > context - 1 - plan.window
            if plan.quantised:
                # Of all heads at once, and beside each other as the scores of their tokens are.
                for kind in range(2):
                    pieces = [buffers[1][slot, place, kind] for place in range(plan.block_pages)]
                    in_rows[0][kind] = jnp.concatenate(pieces, axis=1)
            state = (queries, buffers[0].at[slot], *in_rows, peak, total, summed)

            @pl.when(whole)
            def _() -> None:
                _every_head(plan, lambda head: _attend(plan, head, state, None))

            @pl.when(jnp.logical_not(whole))
            def _() -> None:
                _every_head(plan, lambda head: _attend(plan, head, state, (first, stop, context, length)))

            return 1 - slot

        turn[0] = jax.lax.fori_loop(0, blocks, block, turn[0])
        valid = _indices(plan, (plan.rows, 1)) < length

        def finish(head: Any) -> None:
            weight = total[head]
            some = valid & (weight != 0)
            mixed[0, 0, head] = jnp.where(some, summed[head] / weight, 0).astype(mixed.dtype)
            column = jnp.where(some, peak[head] + jnp.log(weight), -jnp.inf)
            logs[0, 0, head] = _as_row(column, logs.shape[-1])

        _every_head(plan, finish)


def _every_head(plan: Plan, work: Callable[[Any], None]) -> None:
    """Key heads up to `UNROLLED` at a time, whose work the compiler may interleave; the code grows no further."""
    together = next(size for size in range(UNROLLED, 0, -1) if plan.kv_heads % size == 0)

    def several(turn: Any, _: None) -> None:
        for head in range(together):
            work(turn * together + head)

    if together == plan.kv_heads:
        several(0, None)
    else:
        jax.lax.fori_loop(0, plan.kv_heads // together, several, None)


def _attend(plan: Plan, head: Any, state: tuple[Any, ...], edge: tuple[Any, Any, Any, Any] | None) -> None:
    """One key head's queries over one block. `edge`: where the block lies, if not all of its keys are seen by all."""
    queries, held, *in_rows, peak, total, summed = state
    precision = jax.lax.Precision.HIGHEST if plan.compute_dtype == jnp.float32 else None
    shape = (plan.rows, plan.block_tokens)
    keys = held[:, 0, head].reshape(plan.block_tokens, plan.head_dim)
    values = held[:, 1, head].reshape(plan.block_tokens, plan.head_dim)
    scores = jax.lax.dot_general(
        queries[0, head].astype(plan.compute_dtype),
        keys.astype(plan.compute_dtype),
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    scale = plan.scale
    if plan.quantised:
        scale = in_rows[0][0, pl.ds(head, 1)] * scale
    scores *= scale
    if plan.soft_cap is not None:
        scores = plan.soft_cap * jnp.tanh(scores * (1 / plan.soft_cap))
    value_scales = in_rows[0][1, pl.ds(head, 1)] if plan.quantised else None
    if edge is not None:
        first, stop, context, length = edge
        place = first + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        index = _indices(plan, shape)
        position = context - length + index
        visible = (place <= position) & (place < stop) & (index < length)
        if plan.window is not None:
            visible &= place > position - plan.window
        scores = jnp.where(visible, scores, -jnp.inf)
        # A weight of zero does not silence a NaN: what none may see is taken out.
        seen_from = -1 if plan.window is None else context - length - plan.window
        seen_until = jnp.minimum(stop, context)

        def seen(shape: tuple[int, ...], axis: int) -> Array:
            place = first + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
            return (place > seen_from) & (place < seen_until)

        if value_scales is not None:
            value_scales = jnp.where(seen(value_scales.shape, 1), value_scales, 0)
        if values.dtype != jnp.int8:
            values = jnp.where(seen(values.shape, 0), values.astype(jnp.float32), 0)
    before = peak[head]
    highest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    base = highest if edge is None else jnp.where(highest == -jnp.inf, 0, highest)
    weights = jnp.exp(scores - base)
    kept = jnp.exp(before - base)
    peak[head] = highest
    total[head] = total[head] * kept + jnp.sum(weights, axis=1, keepdims=True)
    if value_scales is not None:
        weights *= value_scales
    summed[head] = summed[head] * kept + jax.lax.dot_general(
        weights.astype(plan.compute_dtype),
        values.astype(plan.compute_dtype),
        (((1,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _indices(plan: Plan, shape: tuple[int, ...]) -> Array:
    """Of each row of one key head's queries: which query token of the sequence it is."""
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    index = jnp.zeros(shape, jnp.int32)
    for token in range(1, plan.width):
        index += (row >= token * plan.groups).astype(jnp.int32)
    return jnp.where(row < plan.width * plan.groups, index, plan.width)


def _as_row(column: Float[Array, "rows 1"], lanes: int) -> Float[Array, "1 lanes"]:
    """The same numbers side by side: each lane keeps its own row's, and the rows are added up."""
    rows = column.shape[0]
    shape = (rows, lanes)
    own = jax.lax.broadcasted_iota(jnp.int32, shape, 0) == jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.sum(jnp.where(own, jnp.broadcast_to(column, shape), 0), axis=0, keepdims=True)


def _vmem(plan: Plan, stored: list[Array], query_dtype: Any, mixed_dtype: Any, target: Target) -> int:
    """Bytes of VMEM: buffers as they are declared, and what the compiler was seen to spill at most, rounded up."""
    heads, rows, tokens, head_dim = plan.kv_heads, plan.rows, plan.block_tokens, plan.head_dim
    vectors = (heads, rows, head_dim)
    # A float32 product is made of products of three bfloat16 parts of each number; no TPU before v7 knows e4m3.
    costly = plan.compute_dtype == jnp.float32 or stored[0].dtype == jnp.float8_e4m3fn
    copies = 6 if costly else 2
    parts = {
        "two blocks of pages": sum(
            tiled_bytes((2, plan.block_pages, *array.shape[2:]), array.dtype) for array in stored
        ),
        "sums": tiled_bytes(vectors, jnp.float32) + 2 * tiled_bytes((heads, rows, 1), jnp.float32),
        "queries": 2 * tiled_bytes(vectors, query_dtype),
        "results": 2 * tiled_bytes(vectors, mixed_dtype) + 2 * tiled_bytes((heads, 1, rows), jnp.float32),
        "scales": 2 * tiled_bytes((heads, tokens), jnp.float32) if plan.quantised else 0,
        "scores": 4 * tiled_bytes((rows, tokens), jnp.float32),
        "keys and values at work": copies * tiled_bytes((tokens, head_dim), jnp.float32),
    }
    return require_vmem("decode", parts, target, "block_pages, or the tokens of a page")


def _most(plan: Plan, pages: KVPages, queries: Array, table_pages: int) -> KernelCost:
    """Of a call in which every context fills its table."""
    shape = AttentionShape(
        heads=plan.kv_heads * plan.groups,
        kv_heads=plan.kv_heads,
        head_dim=plan.head_dim,
        page_tokens=plan.page_tokens,
        dtype_bytes=queries.dtype.itemsize,
        kv_dtype_bytes=pages.data.dtype.itemsize,
        scale_bytes=4 if plan.quantised else 0,
        window=plan.window,
        soft_cap=plan.soft_cap is not None,
    )
    return decode_cost(shape, [(table_pages * plan.page_tokens, plan.width)] * plan.batch)
