"""How blocks rest in a run's tiers: the encodings that the config names, for the blocks of the run's model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mcjax.backends.base import Tiers
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from mcjax.kvpool.encodings.base import BlockLayout
from mcjax.kvpool.encodings.named import packer_of
from mcjax.kvpool.encodings.none import AsComputed
from mcjax.transfer.layout.describe import Layout, whole
from mcjax.types import KVFormat, Packer

DTYPES = {4: "float32", 2: "bfloat16"}
"""Of KV blocks, by the bytes of a number."""


@dataclass(frozen=True, slots=True)
class AtRest:
    """One packer a tier, for every node. `computed`: how a block lies before it is packed."""

    dram: Packer
    ssd: Packer
    computed: Layout | None = None

    def layout(self, packer: Packer) -> Layout | None:
        """How blocks lie where that one packs them; None where nothing here knows."""
        computed = self.computed
        return computed if computed is None or packer.name == "none" else replace(computed, encoding=packer.name)

    @property
    def ssd_lossy(self) -> bool:
        """Whether blocks on SSD may be rounded: there, or before they came down."""
        return self.dram.lossy or self.ssd.lossy


def at_rest(
    tiers: Tiers,
    model: ModelShape,
    kv_format: KVFormat,
    make: Callable[[str, BlockLayout, str], Packer] = packer_of,
) -> AtRest:
    """What `tiers` names, made by `make(name, layout, key)`. Raises `ConfigError` for numbers that it cannot round."""

    def packer(name: str, key: str) -> Packer:
        if name == "none":
            return AsComputed(kv_format.block_bytes)
        return make(name, layout_of(model, kv_format, key), key)

    return AtRest(
        packer(tiers.dram_encoding, "kvpool.dram_encoding"),
        packer(tiers.ssd_encoding, "kvpool.ssd_encoding"),
        host_layout(model, kv_format),
    )


def host_layout(model: ModelShape, kv_format: KVFormat) -> Layout | None:
    """How a block of `model` lies in a node's memory: whole, whatever mesh computed it. None for KV numbers of a width
    that nothing here converts."""
    dtype = DTYPES.get(model.kv_dtype_bytes)
    if dtype is None:
        return None
    sizes = model.layers, model.cache_heads, model.cache_dim, kv_format.block_tokens
    rope_width = model.latent.rope_dim if model.latent else None
    return whole(kv_format.fingerprint, *sizes, dtype, rope_width=rope_width)


def layout_of(model: ModelShape, kv_format: KVFormat, key: str) -> BlockLayout:
    """A block of `model` holds a vector a layer, key or value, token and KV head; or a latent a layer and token."""
    dtype = DTYPES.get(model.kv_dtype_bytes)
    if dtype == "float32" or dtype == "bfloat16":
        rows = model.layers * model.cache_entries * model.cache_heads
        return BlockLayout(dtype, kv_format.block_tokens, rows, model.cache_dim)
    problem = (
        f"model {model.name} has KV numbers of {model.kv_dtype_bytes} bytes; those of {sorted(DTYPES)} are encoded"
    )
    raise ConfigError(key, model.kv_dtype_bytes, problem, ["none"])
