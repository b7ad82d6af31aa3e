"""Writes new keys and values into pages on a TPU, in place: pieces of pages, merged with what they hold.

Mosaic copies whole tiles only, so a token cannot be written alone. A piece that is new from end to end goes from the
staged array to its page directly; of the others the old bits are read, merged and written back. Up to `RING` pieces are
on their way at once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped

from mcjax.kernels.prefill.tpu_schedule import PagePieces

RING = 4
"""Pieces in flight: those that are read and those that are written."""


def write_pieces(
    pages: Shaped[Array, "P L 2 Hkv page *D"],
    staged: Shaped[Array, "W 2 Hkv size *D"],
    pieces: PagePieces,
    layer: Any,
    *,
    interpret: Any,
    vmem_limit_bytes: int,
) -> Shaped[Array, "P L 2 Hkv page *D"]:
    """`pages` with `staged[w]` at every piece's new tokens; all else keeps its bits. `pages` are overwritten in place
    where the caller gives them away (`jax.jit(donate_argnums=...)`), and copied by XLA where not.

    With a trailing axis of `D` numbers (keys and values) or without (scales).
    """
    size = staged.shape[3]
    numbers = jnp.stack([pieces.total, jnp.asarray(layer, jnp.int32)])
    slots = pltpu.VMEM((RING, *staged.shape[1:]), pages.dtype)
    specification = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=5,
        grid=(1,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[slots, slots, pltpu.SemaphoreType.DMA((RING,)), pltpu.SemaphoreType.DMA((RING,))],
    )
    return pl.pallas_call(
        _body,
        grid_spec=specification,
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={6: 0},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit_bytes),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=2 * staged.size * staged.dtype.itemsize
        ),
        interpret=interpret,
        name=f"prefill_write_{size}",
    )(numbers, pieces.page, pieces.offset, pieces.least, pieces.until, staged, pages)


def _body(
    numbers: Any,
    page: Any,
    offset: Any,
    least: Any,
    until: Any,
    staged: Any,
    _: Any,
    pages: Any,
    old: Any,
    new: Any,
    reads: Any,
    writes: Any,
) -> None:
    count, layer = numbers[0], numbers[1]
    size = staged.shape[3]

    def place(w: Any) -> Any:
        """The piece's tokens in its page."""
        whole = pages.at[page[w], layer]
        if size == pages.shape[4]:
            return whole
        return whole.at[:, :, pl.ds(pl.multiple_of(offset[w], size), size)]

    def all_new(w: Any) -> Any:
        return (least[w] == 0) & (until[w] == size)

    def read(w: Any, slot: Any) -> list[Any]:
        return [
            pltpu.make_async_copy(place(w), old.at[slot], reads.at[slot]),
            pltpu.make_async_copy(staged.at[w], new.at[slot], reads.at[slot]),
        ]

    def write(w: Any, slot: Any) -> Any:
        return pltpu.make_async_copy(old.at[slot], place(w), writes.at[slot])

    def write_directly(w: Any, slot: Any) -> Any:
        return pltpu.make_async_copy(staged.at[w], place(w), writes.at[slot])

    def begin(w: Any, slot: Any) -> None:
        pl.when(all_new(w))(lambda: write_directly(w, slot).start())

        @pl.when(~all_new(w))
        def _() -> None:
            for copy in read(w, slot):
                copy.start()

    def merge(w: Any, slot: Any) -> None:
        for copy in read(w, slot):
            copy.wait()
        token = lax.broadcasted_iota(jnp.int32, old.shape[1:], 2)
        fresh = (token >= least[w]) & (token < until[w])
        old[slot] = jnp.where(fresh, new[slot], old[slot])
        write(w, slot).start()

    def end(w: Any, slot: Any) -> None:
        pl.when(all_new(w))(lambda: write_directly(w, slot).wait())
        pl.when(~all_new(w))(lambda: write(w, slot).wait())

    def step(at: Any, _: None) -> None:
        """Begins piece `at`, merges the one half a ring before it, ends the one a ring before it."""
        ended, merged = at - RING, at - RING // 2
        pl.when(ended >= 0)(lambda: end(jnp.maximum(ended, 0), lax.rem(at, RING)))
        pl.when(at < count)(lambda: begin(jnp.minimum(at, count - 1), lax.rem(at, RING)))
        middle = jnp.clip(merged, 0, jnp.maximum(count - 1, 0))
        pl.when((merged >= 0) & (merged < count) & ~all_new(middle))(lambda: merge(middle, lax.rem(merged, RING)))

    lax.fori_loop(0, jnp.where(count > 0, count + RING, 0), step, None)
