"""The Pallas kernels as an engine asks for them: rows of one width become ragged sequences, arrays become `KVPages`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from mcjax.kernels.attention.pages import places_of
from mcjax.kernels.attention.pages import write as scatter
from mcjax.kernels.decode.dispatch import decode
from mcjax.kernels.kv_pack.blocks import KVBlocks
from mcjax.kernels.kv_pack.dispatch import kv_pack, kv_unpack
from mcjax.kernels.pages import KVPages
from mcjax.kernels.prefill.dispatch import prefill
from mcjax.kernels.target import Target


@dataclass(frozen=True, slots=True)
class Prefill:
    """An `Attention` by the kernel `prefill`: writes and attends in one call; padding costs next to nothing."""

    target: Target

    def __call__(
        self,
        queries: Float[Array, "B T H D"],
        keys: Float[Array, "B T Hkv D"],
        values: Float[Array, "B T Hkv D"],
        pages: Shaped[Array, "P L 2 Hkv page D"],
        layer: int,
        page_table: Int[Array, "B N"],
        positions: Int[Array, "B T"],
        **look: Any,
    ) -> tuple[Float[Array, "B T H D"], Shaped[Array, "P L 2 Hkv page D"]]:
        """See `base.Attention`."""
        mixed, written = prefill(
            _flat(queries),
            _flat(keys),
            _flat(values),
            KVPages(pages),
            layer,
            page_table,
            *_ragged(positions),
            target=self.target,
            **look,
        )
        return mixed.reshape(queries.shape), written.data


@dataclass(frozen=True, slots=True)
class Decode:
    """An `Attention` by the kernel `decode`, whose few new tokens are written into their pages before it."""

    target: Target

    def __call__(
        self,
        queries: Float[Array, "B T H D"],
        keys: Float[Array, "B T Hkv D"],
        values: Float[Array, "B T Hkv D"],
        pages: Shaped[Array, "P L 2 Hkv page D"],
        layer: int,
        page_table: Int[Array, "B N"],
        positions: Int[Array, "B T"],
        **look: Any,
    ) -> tuple[Float[Array, "B T H D"], Shaped[Array, "P L 2 Hkv page D"]]:
        """See `base.Attention`."""
        if self.target.platform == "tpu":
            from mcjax.kernels.prefill.tpu_write import write

            arrays = (_flat(keys), _flat(values), KVPages(pages), layer, page_table)
            pages = write(*arrays, *_ragged(positions), target=self.target).data
        else:
            places = places_of(pages, page_table, positions, "heads_first")
            pages = scatter(pages, layer, places, jnp.stack([keys, values], axis=2), "heads_first")
        contexts = positions.max(axis=1) + 1  # a row of padding has none
        lengths = (positions >= 0).sum(axis=1, dtype=jnp.int32)
        mixed, _ = decode(queries, KVPages(pages), layer, page_table, contexts, lengths, target=self.target, **look)
        return mixed, pages


@dataclass(frozen=True, slots=True)
class Pack:
    """A `KVPack` by the kernels of that name."""

    target: Target

    def pack(
        self, pages: Shaped[Array, "P L 2 Hkv page D"], slots: Int[Array, " W"]
    ) -> Shaped[Array, "W L 2 page Hkv D"]:
        """See `base.KVPack`."""
        return kv_pack(KVPages(pages), slots, target=self.target).data

    def unpack(
        self,
        pages: Shaped[Array, "P L 2 Hkv page D"],
        slots: Int[Array, " W"],
        blocks: Shaped[Array, "W L 2 page Hkv D"],
    ) -> Shaped[Array, "P L 2 Hkv page D"]:
        """See `base.KVPack`."""
        return kv_unpack(KVPages(pages), slots, KVBlocks(blocks), target=self.target).data


def _flat(array: Float[Array, "B T X D"]) -> Float[Array, "BT X D"]:
    return array.reshape(-1, *array.shape[2:])


def _ragged(positions: Int[Array, "B T"]) -> tuple[Int[Array, " B"], Int[Array, " B"], Int[Array, " B"]]:
    """Of each row as a sequence among all rows' tokens: the first row, new tokens, tokens before those."""
    batch, steps = positions.shape
    starts = jnp.arange(batch, dtype=jnp.int32) * steps
    return starts, (positions >= 0).sum(axis=1, dtype=jnp.int32), jnp.maximum(positions[:, 0], 0)
