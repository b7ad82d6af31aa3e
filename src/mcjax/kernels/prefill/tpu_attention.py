"""The attention of `tpu.prefill`: blocks of queries against their sequence's pages, all keys from the pages.

A block's queries are rows `[query_tokens, H, D]`, which are copied as they lie; each key head's share is packed to
`[query_tokens G, D]`. A block of keys is some pages, each copied whole: keys and values of all heads lie side by side.
While one block of keys is computed with, the next one is on its way, also across blocks of queries; so is the next
block of queries, and the results of the one before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from mcjax.kernels import compat
from mcjax.kernels.pages import KVPages
from mcjax.kernels.prefill.tpu_plan import LANES, Plan
from mcjax.kernels.prefill.tpu_schedule import QueryBlocks

HIDDEN = -0.7 * float(np.finfo(np.float32).max)
"""The score of a key that a query does not see. Finite: a difference of two is no NaN. A row that has seen no key yet
gathers rubbish under it, which its first key wipes out."""


def attend(
    plan: Plan,
    queries: Float[Array, "T H D"],
    pages: KVPages,
    layer: Any,
    page_table: Int[Array, "B N"],
    blocks: QueryBlocks,
    *,
    interpret: Any,
) -> Float[Array, "T H D"]:
    """Results of all rows; zeros for rows of nobody."""
    numbers = jnp.stack([blocks.owned, blocks.total, jnp.asarray(layer, jnp.int32)])
    arrays = [queries, pages.data] + ([] if pages.scales is None else [pages.scales])
    semaphores = pltpu.SemaphoreType.DMA((2,))
    scratch = {name: pltpu.VMEM(shape, dtype) for name, (shape, dtype) in plan.scratch.items()}
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    specification = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=6,
        grid=(1,),
        in_specs=[anywhere] * len(arrays),
        out_specs=anywhere,
        scratch_shapes=[*scratch.values(), semaphores, semaphores, semaphores, pltpu.SMEM((1,), jnp.int32)],
    )

    def body(*refs: Any) -> None:
        lists, refs = refs[:6], refs[6:]
        inputs, out, refs = refs[: len(arrays)], refs[len(arrays)], refs[len(arrays) + 1 :]
        _Kernel(plan, lists, inputs, out, dict(zip(scratch, refs)), refs[len(scratch) :]).run()

    return pl.pallas_call(
        body,
        grid_spec=specification,
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=plan.vmem_limit_bytes),
        cost_estimate=compat.cost_estimate(plan.cost),
        interpret=interpret,
        name="prefill_attention",
    )(
        numbers,
        page_table.reshape(-1),
        blocks.sequence,
        blocks.row,
        blocks.rows,
        blocks.position,
        *arrays,
    )


class _Kernel:
    """The kernel's references, by name, and the steps that it is made of. `i`: a block of queries, `j`: of keys."""

    def __init__(self, plan: Plan, lists: Any, inputs: Any, out: Any, scratch: dict[str, Any], remaining: Any):
        self.plan = plan
        self.numbers, self.table, self.sequence, self.row, self.rows, self.position = lists
        self.queries, self.data, *self.scales = inputs
        self.out = out
        self.scratch = scratch
        self.arrived, self.left, self.fetched, self.key_block = remaining

    def run(self) -> None:
        owned, total = self.numbers[0], self.numbers[1]
        self.key_block[0] = 0

        @pl.when(owned > 0)
        def _() -> None:
            self.arrival(0).start()
            self.fetch(0, self.key_blocks(0)[0], 0, lambda copy: copy.start())

        def step(i: Any, _: None) -> None:
            """Block `i`, and the end of the copy that block `i - 2` has begun."""
            pl.when(i >= 2)(lambda: self.leave(jnp.maximum(i - 2, 0), lambda copy: copy.wait()))
            pl.when(i < owned)(lambda: self.block(i))

            @pl.when((i >= owned) & (i < total))
            def _() -> None:
                self.scratch["leaving"][i & 1] = jnp.zeros_like(self.scratch["leaving"][0])

            pl.when(i < total)(lambda: self.leave(i, lambda copy: copy.start()))

        lax.fori_loop(0, total + 2, step, None)

    # What a block of queries is about

    def last_position(self, i: Any) -> Any:
        return self.position[i] + self.rows[i] - 1

    def least_key(self, i: Any) -> Any:
        """The first key that any of its queries sees."""
        if self.plan.window is None:
            return jnp.int32(0)
        return jnp.maximum(self.position[i] - (self.plan.window - 1), 0)

    def key_blocks(self, i: Any) -> tuple[Any, Any]:
        """The first that it sees, and the first behind."""
        tokens = self.plan.key_tokens
        return lax.div(self.least_key(i), tokens), lax.div(self.last_position(i), tokens) + 1

    def source_row(self, i: Any) -> Any:
        """The first row to read: near the end, whole blocks begin earlier."""
        return jnp.minimum(self.row[i], self.plan.tokens - self.plan.query_tokens)

    # Copies: the same descriptors start and are waited for

    def arrival(self, i: Any) -> Any:
        rows = self.queries.at[pl.ds(self.source_row(i), self.plan.query_tokens)]
        return pltpu.make_async_copy(rows, self.scratch["arriving"].at[i & 1], self.arrived.at[i & 1])

    def leave(self, i: Any, act: Callable[[Any], None]) -> None:
        """Rows of a block go to the results, in pieces of powers of two: others' rows must stay as they are."""
        rows, row = self.rows[i], self.row[i]
        inner = row - self.source_row(i)
        size = self.plan.query_tokens
        while size:

            def piece(size: int = size) -> None:
                before = rows & ~(2 * size - 1)  # what the larger pieces have taken
                act(
                    pltpu.make_async_copy(
                        self.scratch["leaving"].at[i & 1, pl.ds(inner + before, size)],
                        self.out.at[pl.ds(row + before, size)],
                        self.left.at[i & 1],
                    )
                )

            pl.when((rows & size) != 0)(piece)
            size //= 2

    def fetch(self, i: Any, j: Any, slot: Any, act: Callable[[Any], None]) -> None:
        """The pages of a block of keys that hold a key that some query of the block sees."""
        plan, layer = self.plan, self.numbers[2]
        first = jnp.maximum(lax.div(self.least_key(i), plan.page_tokens), j * plan.block_pages)
        until = jnp.minimum(lax.div(self.last_position(i), plan.page_tokens) + 1, (j + 1) * plan.block_pages)
        row = self.sequence[i] * plan.table_pages

        def one(index: Any, _: None) -> None:
            page, at = self.table[row + index], index - j * plan.block_pages
            act(
                pltpu.make_async_copy(
                    self.data.at[page, layer], self.scratch["pages"].at[slot, at], self.fetched.at[slot]
                )
            )
            for scales in self.scales:
                act(
                    pltpu.make_async_copy(
                        scales.at[page, layer], self.scratch["scales"].at[slot, at], self.fetched.at[slot]
                    )
                )

        lax.fori_loop(first, until, one, None)

    # Computation

    def block(self, i: Any) -> None:
        """One block of queries, up to its results."""
        owned = self.numbers[0]
        self.arrival(i).wait()
        following = jnp.minimum(i + 1, owned - 1)
        pl.when(i + 1 < owned)(lambda: self.arrival(following).start())
        tiles = self.plan.query_tokens // self.plan.tile_tokens
        lax.fori_loop(0, tiles, lambda t, _: self.pack(i, t), None)
        first, until = self.key_blocks(i)

        def keys(j: Any, _: None) -> None:
            slot = self.key_block[0] & 1
            self.key_block[0] += 1
            ends = j + 1 >= until
            next_i = jnp.where(ends, following, i)
            next_j = jnp.where(ends, self.key_blocks(following)[0], j + 1)
            more = ~ends | (i + 1 < owned)
            pl.when(more)(lambda: self.fetch(next_i, next_j, 1 - slot, lambda copy: copy.start()))
            self.fetch(i, j, slot, lambda copy: copy.wait())
            self.prepare(i, j, slot)
            lax.fori_loop(0, tiles, lambda t, _: self.tile(i, j, t, slot), None)

        lax.fori_loop(first, until, keys, None)
        lax.fori_loop(0, tiles, lambda t, _: self.unpack(i, t), None)

    def pack(self, i: Any, t: Any) -> None:
        """A tile's rows as they came, packed by key head; and a softmax that has seen nothing."""
        plan, scratch = self.plan, self.scratch
        tokens, rows = self.tile_tokens(t), self.tile_rows(t)
        scratch["wide"][...] = scratch["arriving"][i & 1, tokens].astype(jnp.float32)
        for head in range(plan.kv_heads):
            share = scratch["wide"][:, head * plan.group : (head + 1) * plan.group, :]
            share = share.reshape(plan.tile_rows, plan.head_dim)
            scratch["grouped"][head, rows, :] = share.astype(plan.product_dtype)
        state = (plan.kv_heads, plan.tile_rows)
        scratch["peak"][:, rows, :] = jnp.full((*state, LANES), HIDDEN, jnp.float32)
        scratch["total"][:, rows, :] = jnp.zeros((*state, LANES), jnp.float32)
        scratch["mixed"][:, rows, :] = jnp.zeros((*state, plan.head_dim), jnp.float32)

    def unpack(self, i: Any, t: Any) -> None:
        """A tile's results, in rows as they leave."""
        plan, scratch = self.plan, self.scratch
        rows = self.tile_rows(t)
        for head in range(plan.kv_heads):
            mixed = scratch["mixed"][head, rows, :] / scratch["total"][head, rows, :][:, :1]
            shape = (plan.tile_tokens, plan.group, plan.head_dim)
            scratch["wide"][:, head * plan.group : (head + 1) * plan.group, :] = mixed.reshape(shape)
        scratch["leaving"][i & 1, self.tile_tokens(t)] = scratch["wide"][...].astype(plan.dtype)

    def tile_tokens(self, t: Any) -> Any:
        return pl.ds(t * self.plan.tile_tokens, self.plan.tile_tokens)

    def tile_rows(self, t: Any) -> Any:
        return pl.ds(pl.multiple_of(t * self.plan.tile_rows, self.plan.tile_rows), self.plan.tile_rows)

    def tile(self, i: Any, j: Any, t: Any, slot: Any) -> None:
        """A tile of queries meets a block of keys: not at all, or all of it, or what each query sees."""
        plan = self.plan
        start = self.position[i] - (self.row[i] - self.source_row(i)) + t * plan.tile_tokens  # may be before the block
        least = jnp.maximum(start, self.position[i])
        most = jnp.minimum(start + plan.tile_tokens - 1, self.last_position(i))
        first_key = j * plan.key_tokens
        last_key = first_key + plan.key_tokens - 1
        meets = (least <= most) & (first_key <= most)
        clear = last_key <= least
        if plan.window is not None:
            meets &= last_key > least - plan.window
            clear &= first_key > most - plan.window
        pl.when(meets & clear)(lambda: self.all_heads(j, t, slot, None))
        pl.when(meets & ~clear)(lambda: self.all_heads(j, t, slot, start))

    def all_heads(self, j: Any, t: Any, slot: Any, start: Any) -> None:
        """`start`: the position of the tile's first row, where not every query sees every key."""
        plan = self.plan
        rows = self.tile_rows(t)
        visible = None
        if start is not None:
            key = j * plan.key_tokens + lax.broadcasted_iota(jnp.int32, (1, plan.key_tokens), 1)
            row = lax.broadcasted_iota(jnp.int32, (plan.tile_rows, 1), 0)
            position = start + _divided(row, plan.group)
            visible = key <= position
            if plan.window is not None:
                visible &= key > position - plan.window
        self.some_heads(lambda heads: self.meet(heads, rows, slot, visible))

    def meet(self, heads: list[Any], rows: Any, slot: Any, visible: Any) -> None:
        """One step of the running softmax of some key heads.

        All scores come first: then the compiler lets the products of one head run beside the softmax of another. It
        does not know that heads lie apart, and keeps what is read of one behind what is written of another.
        """
        scratch = self.scratch
        scores = [_product(scratch["grouped"][head, rows, :], self.taken(slot, 0, head), 1) for head in heads]
        for head, given in zip(heads, scores):
            before = [scratch[name][head, rows, :] for name in ("peak", "total", "mixed")]
            state = self.softmax(head, given, before, slot, visible)
            for name, value in zip(("peak", "total", "mixed"), state):
                scratch[name][head, rows, :] = value

    def softmax(self, head: Any, scores: Any, before: Any, slot: Any, visible: Any) -> tuple[Any, Any, Any]:
        """Peak, total and mixed values with a block's `scores` `[tile_rows, key_tokens]` in."""
        plan, scratch = self.plan, self.scratch
        old_peak, total, mixed = before
        if plan.quantised:
            scores = scores * scratch["scale_rows"][0, head]
        factor = math.log2(math.e)  # positive: the largest score stays the largest
        if plan.soft_cap is not None:
            scores = jnp.tanh(scores * (plan.scale / abs(plan.soft_cap)))
            factor *= abs(plan.soft_cap)
        elif plan.scale > 0:
            factor *= plan.scale
        else:
            scores = scores * plan.scale
        if visible is not None:
            scores = jnp.where(visible, scores, HIDDEN)
        peak = jnp.maximum(old_peak, scores.max(axis=1, keepdims=True))
        weights = jnp.exp2((scores - peak[:, :1]) * factor)
        fade = jnp.exp2((old_peak - peak) * factor)
        total = fade * total + weights.sum(axis=1, keepdims=True)
        if plan.quantised:
            weights = weights * scratch["scale_rows"][1, head]
        added = _product(weights.astype(plan.product_dtype), self.taken(slot, 1, head), 0)
        return peak, total, fade[:, :1] * mixed + added

    def taken(self, slot: Any, which: int, head: Any) -> Float[Array, "key_tokens D"]:
        """A block's keys (0) or values (1), as they are multiplied."""
        plan = self.plan
        if plan.converts:
            return self.scratch["converted"][which, head]
        return self.scratch["pages"][slot, :, which, head].reshape(plan.key_tokens, plan.head_dim)

    def prepare(self, i: Any, j: Any, slot: Any) -> None:
        """What is done once to a block of keys: values that no query of the block sees become zeros, since zero times
        NaN is NaN (they were not copied, or may be anything where they come from); narrow numbers become wide."""
        plan, scratch = self.plan, self.scratch
        least, last = self.least_key(i), self.last_position(i)
        first = j * plan.key_tokens

        def seen(key: Any) -> Any:
            return (first + key >= least) & (first + key <= last)

        shape = (plan.block_pages, plan.page_tokens, plan.head_dim)
        key = lax.broadcasted_iota(jnp.int32, shape, 0) * plan.page_tokens + lax.broadcasted_iota(jnp.int32, shape, 1)

        def convert(head: Any) -> None:
            for which in (0, 1):
                numbers = scratch["pages"][slot, :, which, head].astype(jnp.float32)
                if which == 1:
                    numbers = jnp.where(seen(key), numbers, 0)
                numbers = numbers.astype(plan.product_dtype)
                scratch["converted"][which, head] = numbers.reshape(plan.key_tokens, plan.head_dim)
                if plan.quantised:
                    pieces = [scratch["scales"][slot, at, which, pl.ds(head, 1)] for at in range(plan.block_pages)]
                    row = jnp.concatenate(pieces, axis=1)
                    if which == 1:
                        row = jnp.where(seen(lax.broadcasted_iota(jnp.int32, row.shape, 1)), row, 0)
                    scratch["scale_rows"][which, head] = row

        def clean(head: Any) -> None:
            values = scratch["pages"][slot, :, 1, head]
            scratch["pages"][slot, :, 1, head] = jnp.where(seen(key), values, 0)

        if plan.converts:
            self.each_head(convert)
        else:
            pl.when((first < least) | (first + plan.key_tokens - 1 > last))(lambda: self.each_head(clean))

    def each_head(self, act: Callable[[Any], None]) -> None:
        lax.fori_loop(0, self.plan.kv_heads, lambda head, _: act(head), None)

    def some_heads(self, act: Callable[[list[Any]], None]) -> None:
        """All key heads, two at a time if their number is even."""
        together = 2 - self.plan.kv_heads % 2

        def some(at: Any, _: None) -> None:
            act([at * together + head for head in range(together)])

        lax.fori_loop(0, self.plan.kv_heads // together, some, None)


def _product(left: Any, right: Any, axis: int) -> Any:
    """A float32 matrix product over the last axis of `left` and `axis` of `right`."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((1,), (axis,)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _divided(rows: Any, divisor: int) -> Any:
    """`rows // divisor` without a division, for rows below `2**20 / divisor`: vectors of integers have none."""
    if divisor & (divisor - 1) == 0:
        return rows >> (divisor.bit_length() - 1)
    return (rows * (2**20 // divisor + 1)) >> 20
