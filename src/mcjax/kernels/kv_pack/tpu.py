"""Packing and unpacking on a TPU: pages stay in HBM, DMA fetches and leaves, two buffers each way.

Two bodies, both of them for either direction:

* `_moved`: DMA from HBM to HBM and nothing else. Pages have heads before tokens, and so has what this writes: a range
  of heads is a stride of the descriptor. The transposition to tokens first is left to XLA, which makes it a bitcast
  where the blocks lie in memory with heads first.
* `_converted`: through VMEM, where numbers are transposed to tokens first, quantised or restored.

What was found in the HLO compiled for v5e and v6e: XLA by itself lays blocks `[W, L, 2, page, heads, D]` out with
tokens first only if heads then fill whole tiles (2 heads of bfloat16, 4, multiples of 8), and with heads first
otherwise (3 heads, 1 or 2 of int8). So with the default layout the former go through VMEM, and come out as they are to
lie; the latter are moved as they are. With `layout="free"` all of them are, which costs a copy (as much traffic again)
where the layout of the result is not free after all. DMA straight to tokens first compiles with whole tiles only, as
`[W, L, 2, page, heads D]` with `D` a multiple of 128; the reshape after it is the same copy, so nothing is gained.
With `D` below 128 it may put yet another axis innermost, and copies blocks then: give them formats as `KVPages.formats`
does. Scales are small, and XLA copies those of the blocks to a layout without padding.

Layers, and keys and values, are one axis of `R` rows here; a step takes so many rows of one slot.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from mcjax.cost.kernels import KernelCost
from mcjax.kernels import compat
from mcjax.kernels.kv_pack.blocks import KVBlocks
from mcjax.kernels.kv_pack.bound import pack_cost
from mcjax.kernels.kv_pack.rounding import converted
from mcjax.kernels.pages import LARGEST, KVPages
from mcjax.kernels.target import Target
from mcjax.kernels.tuning import tuning
from mcjax.kernels.vmem import require_vmem, tiled_bytes

Layout = Literal["default", "free"]


@dataclass(frozen=True, slots=True)
class _Plan:
    """One call: pages `[P, R, Hkv, page, D]`, blocks `[W, R, page, heads, D]`, or heads before tokens (`free`)."""

    packing: bool
    slots: int
    rows: int
    first_head: int
    heads: int
    page_tokens: int
    head_dim: int
    page_dtype: Any
    block_dtype: Any
    layout: Layout
    step_rows: int = 1
    copies: int = 1
    """How many of `_moved` are on their way at once."""

    @property
    def converts(self) -> bool:
        return self.page_dtype != self.block_dtype

    @property
    def transposes(self) -> bool:
        """Whether tokens come before heads in memory: as XLA lays blocks out, if heads fill tiles without padding.

        A tile has 8 rows, or 4, 2 or 1 where heads are as few, but one for each number of a 32-bit word. Of one head it
        makes no difference which comes first.
        """
        rows = min(8, max(4 // self.block_dtype.itemsize, pl.next_power_of_2(self.heads)))
        return self.layout == "default" and self.heads > 1 and self.heads % rows == 0

    @property
    def steps(self) -> int:
        return self.slots * (self.rows // self.step_rows)

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Of what a step has of a page."""
        return (self.step_rows, self.heads, self.page_tokens, self.head_dim)

    @property
    def block_shape(self) -> tuple[int, ...]:
        tokens = (self.page_tokens, self.heads) if self.transposes else (self.heads, self.page_tokens)
        return (self.step_rows, *tokens, self.head_dim)

    def place(self, step: Any) -> tuple[Any, Any]:
        """Which slot, and the first row."""
        each = self.rows // self.step_rows
        return step // each, (step % each) * self.step_rows

    def page(self, pages: Any, slots: Any, step: Any) -> Any:
        slot, row = self.place(step)
        return pages.at[slots[slot], pl.ds(row, self.step_rows), pl.ds(self.first_head, self.heads)]

    def block(self, blocks: Any, step: Any) -> Any:
        slot, row = self.place(step)
        return blocks.at[slot, pl.ds(row, self.step_rows)]


def _moved(plan: _Plan, slots: Any, *refs: Any) -> None:
    """All of them by DMA, the oldest of `copies` waited for before another one starts."""
    source, target, sent = refs[0], refs[-2], refs[-1]

    def copy(step: Any) -> Any:
        if plan.packing:
            ends = plan.page(source, slots, step), plan.block(target, step)
        else:
            ends = plan.block(source, step), plan.page(target, slots, step)
        return pltpu.make_async_copy(*ends, sent.at[step % plan.copies])

    def start(step: Any, carry: None) -> None:
        @pl.when(step >= plan.copies)
        def _() -> None:
            copy(step - plan.copies).wait()

        copy(step).start()

    jax.lax.fori_loop(0, plan.steps, start, None)
    last = min(plan.copies, plan.steps)
    jax.lax.fori_loop(plan.steps - last, plan.steps, lambda step, _: copy(step).wait(), None)


def _converted(plan: _Plan, scaled: bool, slots: Any, *refs: Any) -> None:
    """A step: the next one's numbers are on their way here and the last one's on their way back meanwhile."""
    remaining = list(refs)
    source = remaining.pop(0)
    scales = remaining.pop(0) if scaled else None
    if not plan.packing:
        remaining.pop(0)  # the pages as they were: the same memory as the pages to be
    target = remaining.pop(0)
    *found_scales, arriving, leaving, arrived, left = remaining
    step, turn = pl.program_id(0), pl.program_id(0) % 2

    def fetch(step: Any) -> Any:
        place = plan.page(source, slots, step) if plan.packing else plan.block(source, step)
        return pltpu.make_async_copy(place, arriving.at[step % 2], arrived.at[step % 2])

    def send(step: Any) -> Any:
        place = plan.block(target, step) if plan.packing else plan.page(target, slots, step)
        return pltpu.make_async_copy(leaving.at[step % 2], place, left.at[step % 2])

    pl.when(step == 0)(lambda: fetch(step).start())
    pl.when(step + 1 < plan.steps)(lambda: fetch(step + 1).start())
    fetch(step).wait()
    pl.when(step >= 2)(lambda: send(step - 2).wait())

    def convert(row: Any, carry: None) -> None:
        numbers = arriving[turn, row]
        if plan.transposes and not plan.packing:
            numbers = jnp.swapaxes(numbers, 0, 1)
        if plan.converts:
            given = None if scales is None else scales[0, row][..., None]
            dtype = plan.block_dtype if plan.packing else plan.page_dtype
            numbers, made = converted(numbers, given, dtype)
            if made is not None:
                found_scales[0][0, row] = made[..., 0]
        if plan.transposes and plan.packing:
            numbers = jnp.swapaxes(numbers, 0, 1)
        leaving[turn, row] = numbers

    jax.lax.fori_loop(0, plan.step_rows, convert, None)
    send(step).start()

    @pl.when(step == plan.steps - 1)
    def _() -> None:
        if plan.steps > 1:
            send(step - 1).wait()
        send(step).wait()


def _called(
    plan: _Plan,
    target: Target,
    interpret: Any,
    cost: KernelCost,
    slots: Int[Array, " W"],
    source: Shaped[Array, "..."],
    scales: Float[Array, "W R heads page"] | None,
    pages: Shaped[Array, "P R Hkv page D"] | None,
) -> tuple[Shaped[Array, "..."], Float[Array, "W R heads page"] | None]:
    """Blocks of pages, or `pages` with the blocks in; and the scales of what was made, heads before tokens."""
    whole = pl.BlockSpec(memory_space=pl.ANY)
    made = plan.block_dtype if plan.packing else plan.page_dtype
    rescaled = plan.converts and jnp.dtype(made).name in LARGEST
    scale_shape = (plan.slots, plan.rows, plan.heads, plan.page_tokens)
    scale_spec = pl.BlockSpec(
        (1, plan.step_rows, plan.heads, plan.page_tokens),
        lambda step, slots: (step // (plan.rows // plan.step_rows), step % (plan.rows // plan.step_rows), 0, 0),
    )
    if pages is None:
        shapes = [jax.ShapeDtypeStruct((plan.slots, plan.rows, *plan.block_shape[1:]), made)]
    else:
        shapes = [jax.ShapeDtypeStruct(pages.shape, pages.dtype)]
    out_specs = [whole]
    if rescaled:
        shapes.append(jax.ShapeDtypeStruct(scale_shape, jnp.float32))
        out_specs.append(scale_spec)
    operands, in_specs = [source], [whole]
    if scales is not None:
        operands.append(scales)
        in_specs.append(scale_spec)
    aliases = {}
    if pages is not None:
        aliases = {1 + len(operands): 0}  # slots come first
        operands.append(pages)
        in_specs.append(whole)

    if plan.converts or plan.transposes:
        body = functools.partial(_converted, plan, scales is not None)
        here = plan.page_shape if plan.packing else plan.block_shape
        there = plan.block_shape if plan.packing else plan.page_shape
        scratch = [
            pltpu.VMEM((2, *here), source.dtype),
            pltpu.VMEM((2, *there), made),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
        ]
        grid = (plan.steps,)
        limit = vmem_bytes_of(plan, target)
    else:
        body = functools.partial(_moved, plan)
        scratch = [pltpu.SemaphoreType.DMA((plan.copies,))]
        grid = (1,)
        limit = None
    found = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=grid, in_specs=in_specs, out_specs=out_specs, scratch_shapes=scratch
        ),
        out_shape=shapes,
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=limit),
        cost_estimate=compat.cost_estimate(cost),
        interpret=target.interpret if interpret is None else interpret,
        name="kv_pack" if plan.packing else "kv_unpack",
    )(slots.astype(jnp.int32), *operands)
    return found[0], found[1] if rescaled else None


def _scales_packed(
    plan: _Plan, target: Target, interpret: Any, slots: Int[Array, " W"], scales: Float[Array, "P L 2 Hkv page"]
) -> Float[Array, "W R heads page"]:
    """Those of the pages' heads. XLA's gather would bring all pages' scales into another layout first."""
    rows, of_page, of_block, params = _scale_specs(plan, target, scales.shape[3])

    def body(slots: Any, source: Any, found: Any) -> None:
        found[...] = source[:, :, plan.first_head : plan.first_head + plan.heads]

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(plan.slots, plan.rows // rows), in_specs=[of_page], out_specs=of_block
        ),
        out_shape=jax.ShapeDtypeStruct((plan.slots, plan.rows, plan.heads, plan.page_tokens), jnp.float32),
        compiler_params=params,
        interpret=target.interpret if interpret is None else interpret,
        name="kv_pack_scales",
    )(slots.astype(jnp.int32), scales.reshape(scales.shape[0], plan.rows, *scales.shape[3:]))


def _scales_unpacked(
    plan: _Plan,
    target: Target,
    interpret: Any,
    slots: Int[Array, " W"],
    scales: Float[Array, "P L 2 Hkv page"],
    found: Float[Array, "W R heads page"],
) -> Float[Array, "P L 2 Hkv page"]:
    """With those of the heads in. The heads are tiled here: a page's other heads are read and written as they were."""
    rows, of_page, of_block, params = _scale_specs(plan, target, scales.shape[3])

    def body(slots: Any, found: Any, source: Any, target: Any) -> None:
        target[...] = source[...]
        target[:, :, plan.first_head : plan.first_head + plan.heads] = found[...]

    flat = scales.reshape(scales.shape[0], plan.rows, *scales.shape[3:])
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(plan.slots, plan.rows // rows),
            in_specs=[of_block, of_page],
            out_specs=of_page,
        ),
        out_shape=jax.ShapeDtypeStruct(flat.shape, jnp.float32),
        input_output_aliases={2: 0},
        compiler_params=params,
        interpret=target.interpret if interpret is None else interpret,
        name="kv_unpack_scales",
    )(slots.astype(jnp.int32), found, flat).reshape(scales.shape)


def _scale_specs(plan: _Plan, target: Target, kv_heads: int) -> tuple[int, pl.BlockSpec, pl.BlockSpec, Any]:
    """Rows of a step, its share of a page's scales and of a block's, and what the compiler is told."""
    row = tiled_bytes((kv_heads, plan.page_tokens), jnp.float32)
    rows = _largest_share(plan.rows, row, tuning(__package__).find(platform="tpu")["step_bytes"])
    parts = {"scales of pages": 4 * rows * row, "scales of blocks": 2 * rows * row}
    limit = require_vmem("kv_pack scales", parts, target, "page_tokens or the pages' heads")
    of_page = pl.BlockSpec((1, rows, kv_heads, plan.page_tokens), lambda w, part, slots: (slots[w], part, 0, 0))
    of_block = pl.BlockSpec((1, rows, plan.heads, plan.page_tokens), lambda w, part, slots: (w, part, 0, 0))
    params = pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=limit)
    return rows, of_page, of_block, params


def _largest_share(rows: int, row_bytes: int, most_bytes: int) -> int:
    """The most rows that divide `rows` and fit; one, if none does."""
    return max(
        (share for share in range(1, rows + 1) if rows % share == 0 and share * row_bytes <= most_bytes), default=1
    )


def vmem_bytes_of(plan: _Plan, target: Target) -> int:
    """What `_converted` needs: two buffers each way, scales, and a row as float32 while it is converted.

    Raises `KernelRefused` where a core has less.
    """
    row = tiled_bytes((plan.heads, plan.page_tokens, plan.head_dim), jnp.float32)
    scales = tiled_bytes((plan.step_rows, plan.heads, plan.page_tokens), jnp.float32)
    parts = {
        "pages": 2 * tiled_bytes(plan.page_shape, plan.page_dtype),
        "blocks": 2 * tiled_bytes(plan.block_shape, plan.block_dtype),
        "a row being converted": 4 * row,
        "scales": 4 * scales if plan.converts else 0,
    }
    return require_vmem(f"kv_{'pack' if plan.packing else 'unpack'}", parts, target, "page_tokens or heads")


def _planned(plan: _Plan, step_rows: int | None) -> _Plan:
    """With the rows of a step, as many as fit the tuned size and divide the rows there are."""
    use = tuning(__package__).find(platform="tpu")
    size = use["step_bytes"] if plan.converts or plan.transposes else use["copy_bytes"]
    row = tiled_bytes(plan.page_shape[1:], plan.page_dtype)
    return replace(plan, step_rows=step_rows or _largest_share(plan.rows, row, size), copies=use["copies"])


def kv_pack(
    pages: KVPages,
    slots: Int[Array, " W"],
    *,
    first_head: int = 0,
    heads: int | None = None,
    dtype: Any = None,
    target: Target,
    layout: Layout = "default",
    step_rows: int | None = None,
    interpret: Any = None,
) -> KVBlocks:
    """`reference.kv_pack`. With `layout="free"` tokens and heads are left to XLA to swap, by a bitcast if it can.

    Raises `KernelRefused` where a step does not fit VMEM.
    """
    heads = pages.kv_heads - first_head if heads is None else heads
    dtype = jnp.dtype(pages.data.dtype if dtype is None else dtype)
    plan = _plan_of(pages, slots, first_head, heads, dtype, packing=True, layout=layout, step_rows=step_rows)
    scales = None
    if pages.scales is not None:
        scales = _scales_packed(plan, target, interpret, slots, pages.scales)
    data, made = _called(
        plan,
        target,
        interpret,
        pack_cost(pages, plan.slots, heads, dtype, packing=True),
        slots,
        pages.data.reshape(pages.data.shape[0], plan.rows, *pages.data.shape[3:]),
        scales if plan.converts else None,
        None,
    )
    if not plan.transposes:
        data = jnp.swapaxes(data, 2, 3)
    data = data.reshape(plan.slots, pages.layers, 2, *data.shape[2:])
    if plan.converts:
        scales = made
    if scales is None:
        return KVBlocks(data)
    return KVBlocks(data, jnp.swapaxes(scales, 2, 3).reshape(data.shape[:-1]))


def kv_unpack(
    pages: KVPages,
    slots: Int[Array, " W"],
    blocks: KVBlocks,
    *,
    first_head: int = 0,
    target: Target,
    layout: Layout = "default",
    step_rows: int | None = None,
    interpret: Any = None,
) -> KVPages:
    """`reference.kv_unpack`, into the memory of the pages if the caller donates them.

    With `layout="free"` blocks are read as XLA lays them out with heads first, by a bitcast if they are so already.
    Raises `KernelRefused` where a step does not fit VMEM.
    """
    heads = blocks.data.shape[4]
    dtype = jnp.dtype(blocks.data.dtype)
    plan = _plan_of(pages, slots, first_head, heads, dtype, packing=False, layout=layout, step_rows=step_rows)
    source = blocks.data.reshape(plan.slots, plan.rows, *blocks.data.shape[3:])
    if not plan.transposes:
        source = jnp.swapaxes(source, 2, 3)
    scales = None
    if blocks.scales is not None:
        scales = jnp.swapaxes(blocks.scales.reshape(plan.slots, plan.rows, *blocks.scales.shape[3:]), 2, 3)
    data, made = _called(
        plan,
        target,
        interpret,
        pack_cost(pages, plan.slots, heads, dtype, packing=False),
        slots,
        source,
        scales if plan.converts else None,
        pages.data.reshape(pages.data.shape[0], plan.rows, *pages.data.shape[3:]),
    )
    data = data.reshape(pages.data.shape)
    if pages.scales is None:
        return KVPages(data)
    if plan.converts:
        scales = made
    assert scales is not None
    return KVPages(data, _scales_unpacked(plan, target, interpret, slots, pages.scales, scales))


def _plan_of(
    pages: KVPages,
    slots: Int[Array, " W"],
    first_head: int,
    heads: int,
    block_dtype: Any,
    *,
    packing: bool,
    layout: Layout,
    step_rows: int | None,
) -> _Plan:
    plan = _Plan(
        packing=packing,
        slots=slots.shape[0],
        rows=2 * pages.layers,
        first_head=first_head,
        heads=heads,
        page_tokens=pages.page_tokens,
        head_dim=pages.head_dim,
        page_dtype=jnp.dtype(pages.data.dtype),
        block_dtype=block_dtype,
        layout=layout,
    )
    return _planned(plan, step_rows)
