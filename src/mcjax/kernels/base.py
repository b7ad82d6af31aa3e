"""What an engine asks of kernels: attention that writes as it goes, and packing. And where they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Shaped

from mcjax.kernels.choice import Layout
from mcjax.kernels.target import Target


class Attention(Protocol):
    """A layer's attention over paged KV, for a batch of rows."""

    def __call__(
        self,
        queries: Float[Array, "B T H D"],
        keys: Float[Array, "B T Hkv D"],
        values: Float[Array, "B T Hkv D"],
        pages: Shaped[Array, "P L C ..."],
        layer: int,
        page_table: Int[Array, "B N"],
        positions: Int[Array, "B T"],
        /,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        scale: float | None = None,
    ) -> tuple[Float[Array, "B T H D"], Shaped[Array, "P L C ..."]]:
        """Each query's result, and the pages with the new keys and values in.

        A row's tokens follow each other: `positions[b] = start, start + 1, ..`, then -1 for padding. The token at
        position p lies in page `page_table[b, p // page]`, at offset `p % page`. A query sees every key at or before
        its position, the new ones too; one of padding gives zeros. Page `P - 1` is scratch: what padding writes may
        go there. What no query may see may be NaN. Pages lie as `kernels.pages` says (`choice.Layout`).

        Pages of `C = 2` hold keys and values. Of `C = 1` they hold keys alone, which are the values too (latent
        attention): `values` are not looked at.

        `window`: a query sees so many tokens, its own included. `soft_cap`: scores `x` become `cap tanh(x / cap)`.
        `scale`: of scores, before that; None: `D ** -0.5`. A model names those only that it needs: a kernel of a
        user's own may do without.
        """
        ...


class KVPack(Protocol):
    """Between pages and canonical blocks, whose tokens come first however pages lie."""

    def pack(self, pages: Shaped[Array, "P L C ..."], slots: Int[Array, " W"], /) -> Shaped[Array, "W L C page Hkv D"]:
        """The pages that `slots` name, as blocks of the pages' dtype."""
        ...

    def unpack(
        self, pages: Shaped[Array, "P L C ..."], slots: Int[Array, " W"], blocks: Shaped[Array, "W L C page Hkv D"], /
    ) -> Shaped[Array, "P L C ..."]:
        """The pages with the blocks in. Slots may repeat where it does not matter which block stays: the scratch
        page's."""
        ...


@dataclass(frozen=True)
class Site:
    """Where kernels run: what they are compiled for; where devices are many, a mesh that has the axes
    `axes.TENSOR` and `axes.GROUP`."""

    target: Target
    mesh: Mesh | None = None


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The kernels of one site. `decode` is asked where each row has one token."""

    prefill: Attention
    decode: Attention
    kv_pack: KVPack
    pages: Layout
