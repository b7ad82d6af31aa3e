"""Prefill on GPUs, lowered through Triton: every dtype and head dimension. Two kernels a call.

The first stores the new keys and values into their pages, in place. The second is attention in the order of
FlashAttention-2 (https://arxiv.org/abs/2307.08691): a program keeps a block of queries, meets the keys of its sequence
from first to last, and holds a running softmax. Its rows are the query heads of one key head for some neighbouring
tokens, so keys and values are read once a group. Only key blocks at the edges of what is visible are masked, those
beyond are never read.
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

from mcjax.cost.kernels import AttentionShape, KernelCost, prefill_cost
from mcjax.errors import KernelRefused
from mcjax.kernels import compat
from mcjax.kernels.pages import KVPages, stored
from mcjax.kernels.prefill.gpu_blocks import FIRST_POSITION, FIRST_ROW, KEYS, ROWS, SEQUENCE, blocks_of, places_of
from mcjax.kernels.target import Target
from mcjax.kernels.tuning import tuning

MASKED = -1e30
"""A score that no key has. Finite, and so are its products: no difference of two of them is NaN."""

WRITTEN_ROWS = 32


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
    rows: int | None = None,
    block_keys: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
) -> tuple[Float[Array, "T H D"], KVPages]:
    """As `prefill.reference.prefill`; `layer` may be traced, so that one kernel serves all layers.

    `rows` (query heads times tokens of a program) and `block_keys` are powers of two; they, the warps of a program and
    the stages of its pipeline are looked up in `tuning_gpu.json` if not given. The pages are changed in place where
    the caller donates them. Raises `KernelRefused` for pages that the lowering would address wrongly.
    """
    refuse_wrapping(pages)
    kv_bytes = pages.data.dtype.itemsize
    found = tuning("mcjax.kernels.prefill", "tuning_gpu.json").find(
        body="triton", bytes=max(queries.dtype.itemsize, kv_bytes), kv_bytes=kv_bytes, head_dim=queries.shape[2]
    )
    rows, block_keys = rows or found["rows"], block_keys or found["keys"]
    parameters = pltriton.CompilerParams(num_warps=warps or found["warps"], num_stages=stages or found["stages"])
    pages = write(keys, values, pages, layer, page_table, starts, lengths, prefixes, target=target)

    tokens, heads, head_dim = queries.shape
    groups = heads // pages.kv_heads
    rows = max(rows, pl.next_power_of_2(groups))
    blocks = blocks_of(starts, lengths, prefixes, tokens, rows // groups)
    # Exact products where anything is float32; otherwise in bfloat16, which holds every int8 and e4m3 number.
    wide = queries.dtype == jnp.float32 or pages.data.dtype == jnp.float32
    body = functools.partial(
        _attend,
        rows=rows,
        block_keys=block_keys,
        groups=groups,
        page_tokens=pages.page_tokens,
        head_dim=head_dim,
        dtype=jnp.float32 if wide else jnp.bfloat16,
        window=window,
        soft_cap=soft_cap,
        scale=head_dim**-0.5 if scale is None else scale,
        quantised=pages.scales is not None,
    )
    operands = [blocks, _one(layer), page_table, queries, pages.data]
    if pages.scales is not None:
        operands.append(pages.scales)
    out = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        # Blocks vary fastest: programs that run side by side read the same head's keys.
        grid=(blocks.shape[1], pages.kv_heads),
        compiler_params=parameters,
        cost_estimate=compat.cost_estimate(most_cost(queries, pages, page_table.shape, window, soft_cap)),
        interpret=target.interpret,
        name="prefill_attend",
    )(*operands)
    return out, pages


def write(
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
) -> KVPages:
    """The pages with the new keys and values in, changed in place where they are donated. Raises `KernelRefused`."""
    refuse_wrapping(pages)
    tokens = keys.shape[0]
    places = places_of(starts, lengths, prefixes, page_table, tokens, pages.page_tokens, pages.data.shape[0])  # [2, T]
    # XLA quantises: a division on the way through Triton is not the one whose bits blocks at rest have.
    numbers, scales = stored(jnp.stack([keys, values]), pages.data.dtype)  # [2, T, Hkv, D]
    held: list[Array] = [pages.data]
    operands: list[Array] = [places, _one(layer), numbers]
    if pages.scales is not None:
        held.append(pages.scales)
        operands.append(scales)
    out = pl.pallas_call(
        functools.partial(_write, tokens=tokens, pages=pages.data.shape[0], head_dim=pages.head_dim),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in held],
        grid=(pl.cdiv(tokens, WRITTEN_ROWS), pages.kv_heads),
        input_output_aliases={len(operands) + index: index for index in range(len(held))},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        cost_estimate=compat.cost_estimate(
            KernelCost(0, read_bytes=numbers.nbytes, written_bytes=numbers.size * pages.data.dtype.itemsize)
        ),
        interpret=target.interpret,
        name="prefill_write",
    )(*operands, *held)
    return KVPages(*out)


def refuse_wrapping(pages: KVPages) -> None:
    """Raises `KernelRefused` for pages whose addresses jax's Triton lowering computes in too few bits.

    It takes 64-bit offsets for arrays of more than 2^32 bytes, signed 32-bit ones for smaller arrays. They count
    elements: those of one-byte numbers wrap from 2^31 of them on.
    """
    if pages.data.dtype.itemsize == 1 and 2**31 < pages.data.size <= 2**32:
        raise KernelRefused(
            "prefill",
            f"jax's Triton lowering addresses arrays of 2 to 4 GiB wrongly where a number is one byte; these pages are"
            f" {pages.data.size / 2**30:.2f} GiB",
            "keep at most 2 GiB of pages on a device, or more than 4",
        )


def most_cost(
    queries: Float[Array, "T H D"],
    pages: KVPages,
    table: tuple[int, ...],
    window: int | None,
    soft_cap: float | None,
) -> KernelCost:
    """The most that a call of these shapes can take: equal sequences, each at the end of a full table."""
    tokens, heads, head_dim = queries.shape
    shape = AttentionShape(
        heads=heads,
        kv_heads=pages.kv_heads,
        head_dim=head_dim,
        page_tokens=pages.page_tokens,
        dtype_bytes=queries.dtype.itemsize,
        kv_dtype_bytes=pages.data.dtype.itemsize,
        scale_bytes=0 if pages.scales is None else 4,
        window=window,
        soft_cap=soft_cap is not None,
    )
    batch, width = table
    context = width * pages.page_tokens
    new = min(-(-tokens // batch), context)
    return prefill_cost(shape, [(context - new, new)] * batch)


def parts_of(head_dim: int) -> tuple[tuple[int, int], ...]:
    """(first, size) of the powers of two that make up a head: Triton has no other tiles, and none is padded."""
    sizes = [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]
    return tuple((sum(sizes[:index]), size) for index, size in enumerate(sizes))


def _one(number: int | Int[Array, ""]) -> Int[Array, " 1"]:
    return jnp.asarray(number, jnp.int32).reshape(1)


def _write(
    places_ref: Any,  # [2, T]
    layer_ref: Any,  # [1]
    numbers_ref: Any,  # [2, T, Hkv, D]
    *refs: Any,  # scales [2, T, Hkv] if quantised; data and scales, twice: as operands and as the results they alias
    tokens: int,
    pages: int,
    head_dim: int,
) -> None:
    *_, data_ref = refs if len(refs) == 2 else refs[:-1]
    row = pl.program_id(0) * WRITTEN_ROWS + jnp.arange(WRITTEN_ROWS)
    head, layer = pl.program_id(1), layer_ref[0]
    inside = jnp.minimum(row, tokens - 1)
    page = jnp.where(row < tokens, pltriton.load(places_ref.at[0, inside]), pages)
    offset = pltriton.load(places_ref.at[1, inside])
    owned = page < pages
    for kind in range(2):
        for first, size in parts_of(head_dim):
            dims = (first + jnp.arange(size))[None, :]
            numbers = pltriton.load(numbers_ref.at[kind, inside[:, None], head, dims])
            place = data_ref.at[page[:, None], layer, kind, head, offset[:, None], dims]
            pltriton.store(place, numbers, mask=jnp.broadcast_to(owned[:, None], numbers.shape))
        if len(refs) > 2:
            scales = pltriton.load(refs[0].at[kind, inside, head])
            pltriton.store(refs[-1].at[page, layer, kind, head, offset], scales, mask=owned)


def _attend(
    blocks_ref: Any,  # [5, X]
    layer_ref: Any,  # [1]
    table_ref: Any,  # [B, N]
    queries_ref: Any,  # [T, H, D]
    data_ref: Any,  # [P, L, 2, Hkv, page, D]
    *refs: Any,  # scales [P, L, 2, Hkv, page] if quantised; the result [T, H, D]
    rows: int,
    block_keys: int,
    groups: int,
    page_tokens: int,
    head_dim: int,
    dtype: Any,
    window: int | None,
    soft_cap: float | None,
    scale: float,
    quantised: bool,
) -> None:
    out_ref = refs[-1]
    block, head = pl.program_id(0), pl.program_id(1)
    sequence, first_row, count, first_position, end = (
        blocks_ref[column, block] for column in (SEQUENCE, FIRST_ROW, ROWS, FIRST_POSITION, KEYS)
    )
    layer = layer_ref[0]
    parts = [(first + jnp.arange(size))[None, :] for first, size in parts_of(head_dim)]
    row = jnp.arange(rows)
    token, query_head = lax.div(row, groups), head * groups + lax.rem(row, groups)
    inside = jnp.maximum(jnp.minimum(token, count - 1), 0)  # rows beyond the last repeat it, and are not stored
    position = first_position + inside
    places = ((first_row + inside)[:, None], query_head[:, None])
    queries = [pltriton.load(queries_ref.at[(*places, dims)]).astype(dtype) for dims in parts]
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    product = functools.partial(pltriton.dot, precision=precision)
    # Weights are powers of two, and the factor waits for the subtraction where the order of scores allows it.
    factor, shaped = score_of(scale, soft_cap)
    # What the keys of a block are, by what is masked: none of them, or those that not every row sees.
    lowest = 0 if window is None else jnp.maximum(first_position - window + 1, 0)

    def look(index: Array, state: tuple[Any, ...], *, masked: bool) -> tuple[Any, ...]:
        mixed, peak, total = state
        first_key = index * block_keys
        key = first_key + jnp.arange(block_keys)
        if page_tokens % block_keys == 0:
            page = table_ref[sequence, lax.div(first_key, page_tokens)]
            offset = lax.rem(first_key, page_tokens) + jnp.arange(block_keys)
            wide = page
        else:
            known = jnp.minimum(key, end - 1) if masked else key
            page = pltriton.load(table_ref.at[sequence, lax.div(known, page_tokens)])
            offset = lax.rem(known, page_tokens)
            wide = page[:, None]
        seen = jnp.logical_and(key >= lowest, key < end) if masked else None

        def entries(kind: int, dims: Array) -> Array:
            place = data_ref.at[wide, layer, kind, head, offset[:, None], dims]
            if kind == 0 or seen is None:
                return pltriton.load(place).astype(dtype)
            # Numbers at unseen places may be NaN, and a weight of zero does not silence a NaN.
            mask = jnp.broadcast_to(seen[:, None], (block_keys, dims.shape[1]))
            return pltriton.load(place, mask=mask, other=jnp.zeros(mask.shape, data_ref.dtype)).astype(dtype)

        def scales(kind: int) -> Array:
            return pltriton.load(refs[0].at[page, layer, kind, head, offset])

        scores = sum(product(part, entries(0, dims).T) for part, dims in zip(queries, parts, strict=True))
        if quantised:
            scores = scores * scales(0)[None, :]
        scores = shaped(scores)
        if masked:
            visible = key[None, :] <= position[:, None]
            if window is not None:
                visible = jnp.logical_and(visible, key[None, :] > position[:, None] - window)
            scores = jnp.where(visible, scores, MASKED)
        higher = jnp.maximum(peak, scores.max(axis=1))
        base = base_of(higher) if masked else higher
        shrink = jnp.exp2((peak - base) * factor)
        weights = jnp.exp2(scores * factor - (base * factor)[:, None])
        total = total * shrink + weights.sum(axis=1)
        if quantised:
            value_scales = scales(1) if seen is None else jnp.where(seen, scales(1), 0)
            weights = weights * value_scales[None, :]
        weights = weights.astype(dtype)
        mixed = tuple(
            part * shrink[:, None] + product(weights, entries(1, dims)) for part, dims in zip(mixed, parts, strict=True)
        )
        return mixed, higher, total

    until = lax.div(end + block_keys - 1, block_keys)
    if window is None:
        begin = edge = jnp.int32(0)
    else:
        begin = jnp.minimum(lax.div(lowest, block_keys), until)
        all_see = jnp.maximum(end - window, 0)  # from this key on the window hides none from any row
        edge = jnp.clip(lax.div(all_see + block_keys - 1, block_keys), begin, until)
    inner = jnp.clip(lax.div(first_position + 1, block_keys), edge, until)  # up to here no row is too early
    state = (
        tuple(jnp.zeros((rows, dims.shape[1]), jnp.float32) for dims in parts),
        jnp.full((rows,), MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    if window is not None:
        state = lax.fori_loop(begin, edge, functools.partial(look, masked=True), state)
    state = lax.fori_loop(edge, inner, functools.partial(look, masked=False), state)
    mixed, _, total = lax.fori_loop(inner, until, functools.partial(look, masked=True), state)
    share = 1 / jnp.where(total > 0, total, 1)
    real = token < count
    for dims, part in zip(parts, mixed, strict=True):
        result = (part * share[:, None]).astype(out_ref.dtype)
        place = out_ref.at[(first_row + token)[:, None], query_head[:, None], dims]
        pltriton.store(place, result, mask=jnp.broadcast_to(real[:, None], result.shape))


def base_of(peak: Array) -> Array:
    """What scores are counted from: their peak, but zero in a row that has seen nothing yet, whose weights then vanish.

    Counted from `MASKED` itself they would be two to the power of a rounding error of `MASKED`, since a product and a
    difference may be one operation to the compiler: infinite, or nothing, by chance.
    """
    return jnp.where(peak > MASKED, peak, 0.0)


def score_of(scale: float, soft_cap: float | None) -> tuple[float, Any]:
    """A positive factor, and what is done to a product before it: softmax takes 2 to the power of their product."""
    log2e = math.log2(math.e)
    if soft_cap is None:
        return (scale * log2e, lambda scores: scores) if scale > 0 else (log2e, lambda scores: scores * scale)
    # tanh by one power of two and one division: exact to the last bits where the hardware's own keeps eleven.
    twice = 2 * log2e * scale / soft_cap
    return soft_cap * log2e, lambda scores: 1 - 2 / (1 + jnp.exp2(scores * twice))
