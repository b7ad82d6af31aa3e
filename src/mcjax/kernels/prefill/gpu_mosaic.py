"""Prefill on Hopper through Mosaic GPU: warpgroup products with sums in registers, keys and values by TMA.

After FlashAttention-3 (https://arxiv.org/abs/2407.08608). Of the three warpgroups of a program one only moves memory:
it looks pages up and keeps a ring of key and value blocks in shared memory filled. Each of the other two has 64 queries
of one head, and while one is at its softmax the other has the tensor cores. They share their keys and values: two query
heads of the same key head, or, where those are odd in number, neighbouring tokens.

The new keys and values, the blocks of queries and what is masked are those of the Triton body, `gpu.py`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from mcjax.errors import KernelRefused
from mcjax.kernels import compat
from mcjax.kernels.pages import KVPages
from mcjax.kernels.prefill.gpu import MASKED, base_of, score_of, write
from mcjax.kernels.prefill.gpu_blocks import FIRST_POSITION, FIRST_ROW, KEYS, ROWS, SEQUENCE, blocks_of
from mcjax.kernels.target import Target
from mcjax.kernels.tuning import tuning

QUERIES = 64
"""Of a warpgroup: the rows of one of its products."""

COMPUTING = 2
"""Warpgroups of a program that compute; one more moves memory."""


def prefill(
    queries: Float[Array, "T H D"],
    keys: Float[Array, "T Hkv D"],
    values: Float[Array, "T Hkv D"],
    pages: KVPages,
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B N"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    prefixes: Int[Array, " B"],
    *,
    target: Target,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    block_keys: int | None = None,
    stages: int | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "T H D"], KVPages]:
    """As `prefill.reference.prefill`, for what `problem_of` has nothing against; raises `KernelRefused` for the rest.

    `block_keys` and `stages` (how many blocks the ring in shared memory has) are looked up in `tuning_gpu.json` if not
    given. `interpret`: `compat.hopper_interpreter()`, which `target.interpret` alone does not ask for: it takes minutes
    for what Triton's takes seconds. It runs the copies, barriers, masks and stores of
    this body, its three warpgroups side by side; the two products are plain ones there.
    """
    found = tuning("mcjax.kernels.prefill", "tuning_gpu.json").find(
        body="mosaic", bytes=queries.dtype.itemsize, kv_bytes=pages.data.dtype.itemsize, head_dim=queries.shape[2]
    )
    block_keys, stages = block_keys or found["keys"], stages or found["stages"]
    problem = problem_of(queries, pages, block_keys)
    if target.interpret and interpret is None:
        problem = "its interpreter is not asked for"
    if problem:
        raise KernelRefused("prefill for Hopper", problem, "the body through Triton takes it: `prefill/gpu.py`")
    pages = write(keys, values, pages, layer, page_table, starts, lengths, prefixes, target=target)

    tokens, heads, head_dim = queries.shape
    paired = heads // pages.kv_heads % COMPUTING == 0
    blocks = blocks_of(starts, lengths, prefixes, tokens, QUERIES if paired else QUERIES * COMPUTING)
    body = functools.partial(
        _attend,
        paired=paired,
        heads=heads,
        kv_heads=pages.kv_heads,
        layers=pages.layers,
        block_keys=block_keys,
        stages=stages,
        page_tokens=pages.page_tokens,
        head_dim=head_dim,
        window=window,
        soft_cap=soft_cap,
        scale=head_dim**-0.5 if scale is None else scale,
        interpreted=interpret is not None,
    )
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        grid=(blocks.shape[1], heads // COMPUTING if paired else heads),
        grid_names=("block", "heads"),
        num_threads=COMPUTING + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="prefill_attend_hopper",
    )(
        blocks,
        jnp.asarray(layer, jnp.int32).reshape(1),
        page_table,
        queries,
        # One axis of pages: TMA takes few.
        pages.data.reshape(-1, pages.page_tokens, head_dim),
    )
    return out, pages


def problem_of(queries: Float[Array, "T H D"], pages: KVPages, block_keys: int) -> str | None:
    """What this body has no code for."""
    page = pages.page_tokens
    if queries.dtype != jnp.bfloat16 or pages.data.dtype != jnp.bfloat16:
        return f"queries of {queries.dtype} over pages of {pages.data.dtype}, where both must be bfloat16"
    if queries.shape[2] not in (64, 128):  # with 256, sums alone take half of the registers, and some are spilled
        return f"a head dimension of {queries.shape[2]}, where it must be 64 or 128"
    if block_keys % 64:
        return f"blocks of {block_keys} keys, where a product takes 64 at a time"
    if page % block_keys and (block_keys % page or page % 8):
        return f"pages of {page} tokens, which neither are whole blocks of {block_keys} keys nor divide one by eights"
    if math.prod(pages.data.shape[:4]) >= 2**31:
        return "more than 2^31 heads of pages"
    return None


def _attend(
    blocks_ref: Any,  # [5, X]
    layer_ref: Any,  # [1]
    table_ref: Any,  # [B, N]
    queries_ref: Any,  # [T, H, D]
    data_ref: Any,  # [P L 2 Hkv, page, D]
    out_ref: Any,  # [T, H, D]
    *,
    paired: bool,
    heads: int,
    kv_heads: int,
    layers: int,
    block_keys: int,
    stages: int,
    page_tokens: int,
    head_dim: int,
    window: int | None,
    soft_cap: float | None,
    scale: float,
    interpreted: bool,
) -> None:
    block, pair, group = lax.axis_index("block"), lax.axis_index("heads"), lax.axis_index("warpgroup")
    sequence, first_row, count, first_position, end = (
        blocks_ref[column, block] for column in (SEQUENCE, FIRST_ROW, ROWS, FIRST_POSITION, KEYS)
    )
    layer = layer_ref[0]
    head = pair * COMPUTING + group if paired else pair
    kv_head = lax.div(pair * (COMPUTING if paired else 1), heads // kv_heads)
    lowest = 0 if window is None else jnp.maximum(first_position - window + 1, 0)
    until = lax.div(end + block_keys - 1, block_keys)
    if window is None:
        begin = edge = jnp.int32(0)
    else:
        begin = jnp.minimum(lax.div(lowest, block_keys), until)
        all_see = jnp.maximum(end - window, 0)
        edge = jnp.minimum(jnp.maximum(lax.div(all_see + block_keys - 1, block_keys), begin), until)
    inner = jnp.minimum(jnp.maximum(lax.div(first_position + 1, block_keys), edge), until)
    copies = max(block_keys // page_tokens, 1)  # of pages that make up a block
    laid = (lambda array, layout: array) if interpreted else plgpu.layout_cast

    def numbers(dimension: int, shape: tuple[int, int]) -> Array:
        return laid(lax.broadcasted_iota(jnp.int32, shape, dimension), plgpu.Layout.WGMMA)

    def run(
        queries_smem: Any,  # [2, 64, D]
        keys_smem: Any,  # [stages, block_keys, D]
        values_smem: Any,  # [stages, block_keys, D]
        out_smem: Any,  # [2, 64, D]
        queries_come: Any,
        keys_come: Any,
        values_come: Any,
        unclean_come: Any,
        keys_done: Any,
        values_done: Any,
        turns: Any,
    ) -> None:
        def compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            before = 0 if paired else group * QUERIES  # tokens of the block that are the other warpgroup's
            mine, result = queries_smem.at[group], out_smem.at[group]
            plgpu.copy_gmem_to_smem(
                queries_ref.at[pl.ds(first_row + before, QUERIES), head], mine, queries_come.at[group]
            )
            factor, shaped = score_of(scale, soft_cap)

            def take_turns() -> None:
                plgpu.barrier_arrive(turns)
                plgpu.barrier_wait(turns)

            def look(index: Array, state: tuple[Any, Array, Array], *, masked: bool) -> tuple[Any, Array, Array]:
                mixed, peak, total = state
                slot = lax.rem(index - begin, stages)
                plgpu.barrier_wait(keys_come.at[slot])

                def score(sums: Any) -> Array:
                    plgpu.wgmma(sums, mine, plgpu.transpose_ref(keys_smem.at[slot], (1, 0)))
                    take_turns()
                    return sums[...]

                if interpreted:  # the interpreter's products take neither a transposed side nor one in registers
                    scores = jnp.dot(mine[...], keys_smem[slot].T, preferred_element_type=jnp.float32)
                    take_turns()
                else:
                    scores = pl.run_scoped(score, plgpu.WGMMAAccumulatorRef((QUERIES, block_keys), jnp.float32))
                plgpu.barrier_arrive(keys_done.at[slot])
                scores = shaped(scores)
                if masked:
                    position = first_position + before + numbers(0, scores.shape)
                    key = index * block_keys + numbers(1, scores.shape)
                    visible = key <= position
                    if window is not None:
                        visible = jnp.logical_and(visible, key > position - window)
                    scores = jnp.where(visible, scores, MASKED)
                higher = jnp.maximum(peak, scores.max(axis=1))
                base = base_of(higher) if masked else higher
                shrink = jnp.exp2((peak - base) * factor)
                weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(base * factor, scores.shape, [0]))
                mixed = mixed * lax.broadcast_in_dim(shrink, mixed.shape, [0])
                total = total * shrink + weights.sum(axis=1)
                narrow = weights.astype(jnp.bfloat16)
                if not interpreted:  # keep the softmax on this side of the barrier
                    mixed, total, higher, narrow = lax.optimization_barrier((mixed, total, higher, narrow))
                plgpu.barrier_arrive(turns)
                plgpu.barrier_wait(values_come.at[slot])
                plgpu.barrier_wait(turns)
                if interpreted:
                    mixed += jnp.dot(narrow, values_smem[slot], preferred_element_type=jnp.float32)
                else:
                    mixed = pl.run_state(lambda sums: plgpu.wgmma(sums, narrow, values_smem.at[slot]))(
                        plgpu.WGMMAAccumulatorRef.init(mixed)
                    )
                plgpu.barrier_arrive(values_done.at[slot])
                return mixed, higher, total

            plgpu.barrier_wait(queries_come.at[group])
            pl.when(group == 1)(take_turns)
            row = plgpu.Layout.WGMMA.reduce(1)
            state = (
                laid(jnp.zeros((QUERIES, head_dim), jnp.float32), plgpu.Layout.WGMMA),
                laid(jnp.full((QUERIES,), MASKED, jnp.float32), row),
                laid(jnp.zeros((QUERIES,), jnp.float32), row),
            )
            if window is not None:
                state = lax.fori_loop(begin, edge, functools.partial(look, masked=True), state)
            state = lax.fori_loop(edge, inner, functools.partial(look, masked=False), state)
            mixed, _, total = lax.fori_loop(inner, until, functools.partial(look, masked=True), state)
            pl.when(group == 0)(take_turns)
            share = 1 / jnp.where(total > 0, total, 1.0)
            mixed = (mixed * lax.broadcast_in_dim(share, mixed.shape, [0])).astype(out_ref.dtype)
            real = jnp.minimum(jnp.maximum(count - before, 0), QUERIES)
            # Rows as they lie in device memory, so that any number of them can be stored.
            if interpreted:
                result[...] = mixed
            else:
                compat.store_with_conflicts(result, mixed)
            plgpu.commit_smem()
            # Rows beyond the last are another sequence's: what is stored is in powers of two, as many as it takes.
            for bit in reversed(range(QUERIES.bit_length())):
                rest = lax.rem(real, 2 << bit)

                @pl.when(rest >= 1 << bit)
                def _(rest: Array = rest, bit: int = bit) -> None:
                    first = real - rest
                    plgpu.copy_smem_to_gmem(
                        result.at[pl.ds(first, 1 << bit)],
                        out_ref.at[pl.ds(first_row + before + first, 1 << bit), head],
                    )

            plgpu.wait_smem_to_gmem(0)

        def move() -> None:
            plgpu.set_max_registers(48, action="decrease")

            def fetch(index: Array, kind: int, to: Any, barrier: Any) -> None:
                for copy in range(copies):
                    # Of the last block's pages, those beyond the last key are masked whatever they hold.
                    key = jnp.minimum(index * block_keys + copy * page_tokens, end - 1)
                    page = table_ref[sequence, lax.div(key, page_tokens)]
                    entry = ((page * layers + layer) * 2 + kind) * kv_heads + kv_head
                    if copies == 1:
                        source = data_ref.at[entry, pl.ds(lax.rem(index * block_keys, page_tokens), block_keys)]
                        plgpu.copy_gmem_to_smem(source, to, barrier)
                    else:
                        part = to.at[pl.ds(copy * page_tokens, page_tokens)]
                        plgpu.copy_gmem_to_smem(data_ref.at[entry], part, barrier)

            def step(index: Array, _: None) -> None:
                slot, first_key = lax.rem(index - begin, stages), index * block_keys
                reused = index - begin >= stages
                pl.when(reused)(lambda: plgpu.barrier_wait(keys_done.at[slot]))
                fetch(index, 0, keys_smem.at[slot], keys_come.at[slot])
                pl.when(reused)(lambda: plgpu.barrier_wait(values_done.at[slot]))
                values = values_smem.at[slot]
                clean = jnp.logical_and(first_key >= lowest, first_key + block_keys <= end)
                pl.when(clean)(lambda: fetch(index, 1, values, values_come.at[slot]))

                @pl.when(jnp.logical_not(clean))
                def _() -> None:
                    # Values at unseen places may be NaN, and a weight of zero does not silence a NaN.
                    fetch(index, 1, values, unclean_come)
                    plgpu.barrier_wait(unclean_come)
                    tile = (64, 64)
                    columns = head_dim // tile[1]

                    def sweep(number: Array, _: None) -> None:  # a loop: unrolled it takes more registers than are left
                        row = pl.multiple_of(lax.div(number, columns) * tile[0], tile[0])
                        column = pl.multiple_of(lax.rem(number, columns) * tile[1], tile[1])
                        part = values.at[pl.ds(row, tile[0]), pl.ds(column, tile[1])]
                        key = first_key + row + numbers(0, tile)
                        seen = jnp.logical_and(key >= lowest, key < end)
                        part[...] = jnp.where(seen, part[...], jnp.zeros((), jnp.bfloat16))

                    lax.fori_loop(0, block_keys // tile[0] * columns, sweep, None)
                    plgpu.commit_smem()
                    for _copy in range(copies):
                        plgpu.barrier_arrive(values_come.at[slot])

            lax.fori_loop(begin, until, step, None)
            for slot in range(stages):  # none has more phases than were waited for

                @pl.when(slot < until - begin)
                def _(slot: int = slot) -> None:
                    plgpu.barrier_wait(keys_done.at[slot])
                    plgpu.barrier_wait(values_done.at[slot])

        pl.when(group < COMPUTING)(compute)
        pl.when(group == COMPUTING)(move)

    @pl.when(count > 0)
    def _() -> None:
        tiles = () if interpreted else (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

        def shared(*shape: int) -> Any:
            return plgpu.SMEM(shape, jnp.bfloat16, transforms=tiles)

        pl.run_scoped(
            run,
            shared(COMPUTING, QUERIES, head_dim),
            shared(stages, block_keys, head_dim),
            shared(stages, block_keys, head_dim),
            plgpu.SMEM((COMPUTING, QUERIES, head_dim), jnp.bfloat16),
            plgpu.Barrier(num_barriers=COMPUTING),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=copies),
            plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages),
            plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages),
            plgpu.Barrier(num_arrivals=COMPUTING),
            collective_axes="warpgroup",
        )
