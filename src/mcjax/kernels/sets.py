"""From the choice of a config to the kernels of one site."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from mcjax.kernels.attention.blockwise import paged_attention as blockwise
from mcjax.kernels.attention.reference import paged_attention as reference
from mcjax.kernels.axes import GROUP, TENSOR
from mcjax.kernels.base import Attention, KernelSet, KVPack, Site
from mcjax.kernels.choice import KernelChoice, Layout, Named
from mcjax.kernels.xla import Gather, WriteThenRead


def kernel_set(choice: KernelChoice, site: Site) -> KernelSet:
    """The kernels that `choice` names, made for `site`.

    Over a mesh, what XLA compiles is left to its partitioner; Pallas kernels, which it cannot cut, run on each device's
    own key heads, and so does what is the user's own.
    """
    return KernelSet(
        prefill=_attention("prefill", choice.prefill, choice.pages, site),
        decode=_attention("decode", choice.decode, choice.pages, site),
        kv_pack=_kv_pack(choice.kv_pack, choice.pages, site),
        pages=choice.pages,
    )


def _attention(phase: str, named: Named, layout: Layout, site: Site) -> Attention:
    if named == "xla":
        return WriteThenRead(blockwise, layout)
    if named == "reference":
        return WriteThenRead(reference, layout)
    whole: Attention = _pallas(phase)(site.target) if named == "pallas" else _own(named)
    return whole if site.mesh is None else _SpreadAttention(whole, site.mesh, layout)


def _kv_pack(named: Named, layout: Layout, site: Site) -> KVPack:
    if named == "xla":
        return Gather(layout)
    whole: KVPack = _pallas("kv_pack")(site.target) if named == "pallas" else _own(named)
    return whole if site.mesh is None else _SpreadPack(whole, site.mesh, layout)


def _pallas(what: str) -> Any:
    # Imported only where it is named: whoever takes XLA's kernels need not wait for Pallas.
    from mcjax.kernels import pallas

    return {"prefill": pallas.Prefill, "decode": pallas.Decode, "kv_pack": pallas.Pack}[what]


def _own(named: Any) -> Any:
    """The user's own: an object of the class, or the function with its arguments set."""
    section: Mapping[str, Any] = named
    target = pkgutil.resolve_name(section["_target_"])
    arguments = {name: value for name, value in section.items() if not name.startswith("_")}
    if isinstance(target, type):
        return target(**arguments)
    return partial(target, **arguments) if arguments else target


@dataclass(frozen=True, slots=True)
class _SpreadAttention:
    """Each device's query heads, over the key head (or heads) that they belong to. Nothing crosses between devices."""

    attention: Attention
    mesh: Mesh
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
        def of_device(queries: Array, keys: Array, values: Array, pages: Array, table: Array, at: Array) -> Any:
            return self.attention(queries, keys, values, pages, layer, table, at, **look)

        # Query heads of one key head lie side by side, so the axis of groups cuts inside of a key head.
        query_heads, key_heads = P(None, None, (TENSOR, GROUP)), P(None, None, TENSOR)
        paged = pages_spec(self.layout)
        # Devices of a group write the same keys into pages of their own, which JAX cannot know to be alike.
        spread = jax.shard_map(
            of_device,
            mesh=self.mesh,
            in_specs=(query_heads, key_heads, key_heads, paged, P(), P()),
            out_specs=(query_heads, paged),
            check_vma=False,
        )
        return spread(queries, keys, values, pages, page_table, positions)


@dataclass(frozen=True, slots=True)
class _SpreadPack:
    """Each device's own key heads, of pages and of blocks."""

    kv_pack: KVPack
    mesh: Mesh
    layout: Layout

    def pack(self, pages: Shaped[Array, "P L C ..."], slots: Int[Array, " W"]) -> Shaped[Array, "W L C page Hkv D"]:
        specs = (pages_spec(self.layout), P())
        spread = jax.shard_map(
            self.kv_pack.pack, mesh=self.mesh, in_specs=specs, out_specs=pages_spec("tokens_first"), check_vma=False
        )
        return spread(pages, slots)

    def unpack(
        self, pages: Shaped[Array, "P L C ..."], slots: Int[Array, " W"], blocks: Shaped[Array, "W L C page Hkv D"]
    ) -> Shaped[Array, "P L C ..."]:
        paged = pages_spec(self.layout)
        specs = (paged, P(), pages_spec("tokens_first"))
        spread = jax.shard_map(self.kv_pack.unpack, mesh=self.mesh, in_specs=specs, out_specs=paged, check_vma=False)
        return spread(pages, slots, blocks)


def pages_spec(layout: Layout) -> P:
    """Key heads of pages over `TENSOR`; canonical blocks lie as pages whose tokens come first."""
    return P(None, None, None, TENSOR) if layout == "heads_first" else P(None, None, None, None, TENSOR)
