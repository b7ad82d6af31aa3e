"""Attention and packing that XLA compiles: pages in either layout, on any device, spread over many by the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from mcjax.kernels.attention.pages import places_of, write
from mcjax.kernels.choice import Layout


class PagedAttention(Protocol):
    """Attention over keys that are in their pages already; `attention.reference.paged_attention` says of what."""

    def __call__(
        self,
        queries: Float[Array, "B T H D"],
        pages: Shaped[Array, "P L C ..."],
        layer: int,
        page_table: Int[Array, "B N"],
        positions: Int[Array, "B T"],
        layout: Layout,
        /,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        scale: float | None = None,
    ) -> Float[Array, "B T H D"]: ...


@dataclass(frozen=True, slots=True)
class WriteThenRead:
    """An `Attention` that writes new keys and values first, and then reads everything from the pages.

    So a key lies at the same place of the reduction whether this call computed it or an earlier one did, on this
    instance or on another: that is what makes prefix reuse bitwise exact.
    """

    attend: PagedAttention
    layout: Layout

    def __call__(
        self,
        queries: Float[Array, "B T H D"],
        keys: Float[Array, "B T Hkv D"],
        values: Float[Array, "B T Hkv D"],
        pages: Shaped[Array, "P L C ..."],
        layer: int,
        page_table: Int[Array, "B N"],
        positions: Int[Array, "B T"],
        **look: Any,
    ) -> tuple[Float[Array, "B T H D"], Shaped[Array, "P L C ..."]]:
        """See `base.Attention`."""
        places = places_of(pages, page_table, positions, self.layout)
        entries = [keys, values][: pages.shape[2]]
        pages = write(pages, layer, places, jnp.stack(entries, axis=2), self.layout)
        return self.attend(queries, pages, layer, page_table, positions, self.layout, **look), pages


@dataclass(frozen=True, slots=True)
class Gather:
    """A `KVPack` of plain indexing."""

    layout: Layout

    def pack(self, pages: Shaped[Array, "P L C ..."], slots: Int[Array, " W"]) -> Shaped[Array, "W L C page Hkv D"]:
        """See `base.KVPack`."""
        blocks = pages[slots]
        return blocks if self.layout == "tokens_first" else jnp.swapaxes(blocks, 3, 4)

    def unpack(
        self, pages: Shaped[Array, "P L C ..."], slots: Int[Array, " W"], blocks: Shaped[Array, "W L C page Hkv D"]
    ) -> Shaped[Array, "P L C ..."]:
        """See `base.KVPack`."""
        return pages.at[slots].set(blocks if self.layout == "tokens_first" else jnp.swapaxes(blocks, 3, 4))
