"""The quantising encodings, compiled: the same bytes as those in `kvpool/encodings`, many times faster.

They run on the CPU, whatever the model runs on, and on the thread that moves the block.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped
from numpy.typing import NDArray

from mcjax.backends.jax.placement import Device
from mcjax.kvpool.encodings.base import BlockLayout, Quantised, refuse
from mcjax.kvpool.encodings.named import packer_of
from mcjax.types import Packer

WORDS = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(np.uint16)}
"""As what NumPy hands a dtype's bits over."""


def compiled_packer(name: str, layout: BlockLayout, key: str) -> Packer:
    """The encoding of that name, compiled if it computes anything. Raises `ConfigError` like `packer_of`.

    Where JAX was told to leave the CPU alone, the plain one.
    """
    plain = packer_of(name, layout, key)
    if not isinstance(plain, Quantised):
        return plain
    try:
        return Compiled(plain, jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return plain


class Compiled:
    """A `Packer` with the name, sizes and bytes of a plain one. Thread-safe; compiled when made."""

    def __init__(self, plain: Quantised, device: Device):
        self.name = plain.name
        self.lossy = plain.lossy
        self.block_bytes = plain.block_bytes
        self.packed_bytes = plain.packed_bytes
        self._plain = plain
        layout = plain.layout
        shape = (layout.vectors, layout.width)
        self._words = WORDS[layout.dtype]
        self._shape = shape
        where = jax.sharding.SingleDeviceSharding(device)

        def given(size: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(size, dtype, sharding=where)

        self._pack = jax.jit(self._packed).lower(given(shape, self._words)).compile()
        packed = (given(shape[:1], np.float32), given(shape, plain.number))
        self._unpack = jax.jit(self._unpacked).lower(*packed).compile()

    def pack(self, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """See `types.Packer`."""
        refused, *parts = self._pack(block.view(self._words).reshape(self._shape))
        refuse(self.name, np.flatnonzero(np.asarray(refused)))
        packed = np.empty(self.packed_bytes, np.uint8)
        for place, part in zip(self._plain.parts(packed), parts, strict=True):
            place[:] = np.asarray(part)
        return packed

    def unpack(self, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """See `types.Packer`. The array is XLA's and cannot be written to."""
        return np.asarray(self._unpack(*self._plain.parts(packed))).reshape(-1).view(np.uint8)

    def _packed(
        self, words: Shaped[Array, "V W"]
    ) -> tuple[Bool[Array, " V"], Float[Array, " V"], Shaped[Array, "V W"]]:
        plain = self._plain
        values = _floats(words).astype(jnp.float32)
        most = jnp.abs(values).max(axis=1)
        unwritten = jnp.isnan(values).all(axis=1)
        refused = ~(jnp.isfinite(most) | unwritten)
        scales = jnp.maximum(most * np.float32(1 / plain.largest), np.float32(plain.smallest_scale))
        scaled = jnp.where(unwritten[:, None], 0, values * (1 / scales)[:, None])
        if plain.number == np.int8:
            scaled = jnp.clip(jnp.round(scaled), -127, 127)
        return refused, scales, scaled.astype(plain.number)

    def _unpacked(self, scales: Float[Array, " V"], numbers: Shaped[Array, "V W"]) -> Shaped[Array, "V W"]:
        limit = np.finfo(np.float32).max
        values = jnp.clip(numbers.astype(jnp.float32) * scales[:, None], -limit, limit)
        if self._words == np.float32:
            return values
        return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)


def _floats(words: Shaped[Array, "V W"]) -> Float[Array, "V W"]:
    return jax.lax.bitcast_convert_type(words, jnp.bfloat16) if words.dtype == jnp.uint16 else words
