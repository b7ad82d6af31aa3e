"""Packing and unpacking on a GPU, lowered through Triton.

A program has the vectors of some tokens of one slot, for some heads of some rows (a row: a layer's keys, or values).
Rows and heads are a loop that is unrolled: a head's tile `[tokens, D]` is read from one place and written to another,
each vector as one piece, so that nothing is transposed. All tiles are asked for before the first is needed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Int, Shaped

from mcjax.errors import KernelRefused
from mcjax.kernels import compat
from mcjax.kernels.kv_pack.blocks import KVBlocks
from mcjax.kernels.kv_pack.bound import pack_cost
from mcjax.kernels.kv_pack.rounding import converted
from mcjax.kernels.pages import LARGEST, KVPages
from mcjax.kernels.target import Target
from mcjax.kernels.tuning import tuning


@dataclass(frozen=True, slots=True)
class _Plan:
    """One call: pages `[P, R, Hkv, page, D]`, blocks `[W, R, page, heads, D]`; layers, keys and values are `R` rows."""

    packing: bool
    first_head: int
    heads: int
    page_tokens: int
    head_dim: int
    made: Any
    """Dtype of the numbers that are written."""
    convert: bool
    scales_read: bool
    scales_written: bool
    tile_tokens: int
    tile_heads: int
    tile_rows: int


def _body(plan: _Plan, slots: Any, *refs: Any) -> None:
    remaining = list(refs)
    source = remaining.pop(0)
    source_scales = remaining.pop(0) if plan.scales_read else None
    if not plan.packing:  # the arrays as they were: the same memory as those to be
        del remaining[: 1 + plan.scales_written]
    target = remaining.pop(0)
    target_scales = remaining.pop(0) if plan.scales_written else None

    groups = plan.heads // plan.tile_heads
    window, first_row = pl.program_id(0), pl.program_id(1) * plan.tile_rows
    slot = slots[window]
    first_token = (pl.program_id(2) // groups) * plan.tile_tokens
    first_head = (pl.program_id(2) % groups) * plan.tile_heads
    tokens = first_token + jnp.arange(plan.tile_tokens)
    width = pl.next_power_of_2(plan.head_dim)
    numbers_of = jnp.arange(width)[None, :]
    kept_tokens = tokens < plan.page_tokens
    kept = kept_tokens[:, None] & (numbers_of < plan.head_dim)
    whole = plan.page_tokens % plan.tile_tokens == 0
    mask = None if whole and width == plan.head_dim else kept
    scale_mask = None if whole else kept_tokens

    def read(ref: Any, place: tuple[Any, ...], mask: Any) -> Any:
        return pltriton.load(ref.at[place], mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))

    def ends(row: Any, head: Any, tokens: Any) -> list[tuple[Any, ...]]:
        """Of a head's vectors, where they are read and where they are written."""
        places: list[tuple[Any, ...]] = [(slot, row, plan.first_head + head, tokens), (window, row, tokens, head)]
        return places if plan.packing else places[::-1]

    tiles = [(first_row + row, first_head + head) for row in range(plan.tile_rows) for head in range(plan.tile_heads)]
    found = []
    for tile in tiles:
        numbers = read(source, (*ends(*tile, tokens[:, None])[0], numbers_of), mask)
        scales = None if source_scales is None else read(source_scales, ends(*tile, tokens)[0], scale_mask)
        found.append((numbers, scales))
    for tile, (numbers, scales) in zip(tiles, found, strict=True):
        if plan.convert:
            numbers, made = converted(numbers, None if scales is None else scales[:, None], plan.made)
            scales = None if made is None else made[:, 0]
        pltriton.store(target.at[(*ends(*tile, tokens[:, None])[1], numbers_of)], numbers, mask=mask)
        if target_scales is not None:
            assert scales is not None
            pltriton.store(target_scales.at[ends(*tile, tokens)[1]], scales, mask=scale_mask)


def kv_pack(
    pages: KVPages,
    slots: Int[Array, " W"],
    *,
    first_head: int = 0,
    heads: int | None = None,
    dtype: Any = None,
    target: Target,
    tile_tokens: int | None = None,
    tile_heads: int | None = None,
    warps: int | None = None,
) -> KVBlocks:
    """`reference.kv_pack`. A program has `tile_tokens` (a power of two) of `tile_heads` (which divide the heads).

    What is not given is looked up in `tuning.json`. If few heads leave a program with little, it has several rows.

    Raises `KernelRefused` for arrays that the lowering would address wrongly.
    """
    heads = pages.kv_heads - first_head if heads is None else heads
    dtype = jnp.dtype(pages.data.dtype if dtype is None else dtype)
    shape = (slots.shape[0], 2 * pages.layers, pages.page_tokens, heads, pages.head_dim)
    made = [jax.ShapeDtypeStruct(shape, dtype)]
    if dtype.name in LARGEST:
        made.append(jax.ShapeDtypeStruct(shape[:-1], jnp.float32))
    source = [_rows(pages.data)] + ([] if pages.scales is None else [_rows(pages.scales)])
    found = _called(
        True, pages, dtype, first_head, heads, target, (tile_tokens, tile_heads, warps), slots, source, made
    )
    outer = (slots.shape[0], pages.layers, 2)
    data, *scales = (array.reshape(*outer, *array.shape[2:]) for array in found)
    return KVBlocks(data, scales[0] if scales else None)


def kv_unpack(
    pages: KVPages,
    slots: Int[Array, " W"],
    blocks: KVBlocks,
    *,
    first_head: int = 0,
    target: Target,
    tile_tokens: int | None = None,
    tile_heads: int | None = None,
    warps: int | None = None,
) -> KVPages:
    """`reference.kv_unpack`, into the memory of the pages if the caller donates them; tiles as in `kv_pack`.

    Raises `KernelRefused` for arrays that the lowering would address wrongly.
    """
    dtype, heads = jnp.dtype(blocks.data.dtype), blocks.data.shape[4]
    source = [_rows(blocks.data)] + ([] if blocks.scales is None else [_rows(blocks.scales)])
    held = [_rows(pages.data)] + ([] if pages.scales is None else [_rows(pages.scales)])
    found = _called(
        False, pages, dtype, first_head, heads, target, (tile_tokens, tile_heads, warps), slots, source, held
    )
    scales = None if pages.scales is None else found[1].reshape(pages.scales.shape)
    return KVPages(found[0].reshape(pages.data.shape), scales)


def _called(
    packing: bool,
    pages: KVPages,
    block_dtype: Any,
    first_head: int,
    heads: int,
    target: Target,
    tiles: tuple[int | None, int | None, int | None],
    slots: Int[Array, " W"],
    source: list[Shaped[Array, "..."]],
    result: list[Any],
) -> list[Shaped[Array, "..."]]:
    """`result`: the arrays to be made or, in unpacking, to be written to."""
    for array in (*source, *result):
        _refuse_wrapping("kv_pack" if packing else "kv_unpack", array)
    page_dtype = jnp.dtype(pages.data.dtype)
    use = tuning(__package__).find(platform="gpu", bytes=max(page_dtype.itemsize, block_dtype.itemsize))
    tile_tokens = tiles[0] or min(use["tile_tokens"], pl.next_power_of_2(pages.page_tokens))
    most = max(1, use["tile_numbers"] // (tile_tokens * pl.next_power_of_2(pages.head_dim)))
    tile_heads = tiles[1] or _largest_divisor(heads, most)
    rows = 2 * pages.layers
    plan = _Plan(
        packing=packing,
        first_head=first_head,
        heads=heads,
        page_tokens=pages.page_tokens,
        head_dim=pages.head_dim,
        made=block_dtype if packing else page_dtype,
        convert=page_dtype != block_dtype,
        scales_read=len(source) == 2,
        scales_written=len(result) == 2,
        tile_tokens=tile_tokens,
        tile_heads=tile_heads,
        tile_rows=_largest_divisor(rows, max(1, most // tile_heads)),
    )
    operands = [slots.astype(jnp.int32), *source]
    aliases = {} if packing else {len(operands) + index: index for index in range(len(result))}
    across = pl.cdiv(pages.page_tokens, tile_tokens) * (heads // tile_heads)
    return pl.pallas_call(
        functools.partial(_body, plan),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in result],
        grid=(slots.shape[0], rows // plan.tile_rows, across),
        input_output_aliases=aliases,
        compiler_params=pltriton.CompilerParams(num_warps=tiles[2] or use["warps"], num_stages=1),
        cost_estimate=compat.cost_estimate(pack_cost(pages, slots.shape[0], heads, block_dtype, packing=packing)),
        interpret=target.interpret,
        name="kv_pack" if packing else "kv_unpack",
    )(*operands, *([] if packing else result))


def _largest_divisor(count: int, most: int) -> int:
    return max(share for share in range(1, count + 1) if count % share == 0 and share <= most)


def _rows(array: Shaped[Array, "N L 2 ..."]) -> Shaped[Array, "N R ..."]:
    return array.reshape(array.shape[0], -1, *array.shape[3:])


def _refuse_wrapping(kernel: str, array: Any) -> None:
    """Offsets have 64 bits for arrays of more than 2^32 bytes only, and count elements: below, those of bytes wrap."""
    if array.dtype.itemsize == 1 and 2**31 < array.size <= 2**32:
        raise KernelRefused(
            kernel,
            f"jax's lowering to Triton addresses an array of {array.size:,} bytes wrongly: from 2 GiB to 4 GiB",
            "take fewer or more pages a device, or fewer slots a call",
        )
