"""Conversions inside kernels, to the bits of `pages.stored` on every platform.

What a platform does to `1 / x`, to a cast or to a largest number of NaNs differs: TPUs approximate a reciprocal, Triton
divides by `div.full`, casts to eight bits may round twice. So nothing here is left to them: a reciprocal is corrected
to the nearest float32, numbers are rounded as integers to what the narrow dtype holds before they are cast (which then
is exact), and NaN is looked for as bits. All that is asked of a platform is float32 sums and products to nearest; that
it fuses a product with a sum changes nothing, since the products that are summed are exact.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from mcjax.kernels.pages import LARGEST, SMALLEST_SCALE

_HALF_WORD = 0xFFFFF000 - 2**32
"""Selects the upper 12 bits of a float32's significand, so that products of halves are exact."""


def _bits(values: Float[Array, "*V"]) -> Shaped[Array, "*V"]:
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def _float(bits: Shaped[Array, "*V"]) -> Float[Array, "*V"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _excess(number: Float[Array, "*V"], reciprocal: Float[Array, "*V"]) -> Float[Array, "*V"]:
    """`number reciprocal - 1`, exact where the reciprocal is a unit in the last place off (Dekker's product)."""
    upper, upper_reciprocal = _float(_bits(number) & _HALF_WORD), _float(_bits(reciprocal) & _HALF_WORD)
    lower, lower_reciprocal = number - upper, reciprocal - upper_reciprocal
    found = (upper * upper_reciprocal - 1) + upper * lower_reciprocal
    return (found + lower * upper_reciprocal) + lower * lower_reciprocal


def reciprocal(numbers: Float[Array, "*V"]) -> Float[Array, "*V"]:
    """The float32 nearest to `1 / numbers`, for numbers from `2^-125` to `2^125`; anything for others."""
    exponent = (_bits(numbers) >> 23) - 127
    significand = _float((_bits(numbers) & 0x7FFFFF) | 0x3F800000)  # in [1, 2)
    found = corrected(significand, 1 / significand)
    return _float(_bits(found) - (exponent << 23))


def corrected(numbers: Float[Array, "*V"], quotients: Float[Array, "*V"]) -> Float[Array, "*V"]:
    """The float32 nearest to `1 / numbers` for numbers in [1, 2), from one that may be 32 units in the last place off.

    One step of Newton, then whichever of two neighbours has the smaller exact remainder. A test goes through all
    significands.
    """
    found = quotients - quotients * _excess(numbers, quotients)
    excess = _excess(numbers, found)
    unit = jnp.where(excess > 0, np.float32(2.0**-24), np.float32(-(2.0**-24)))
    return jnp.where(jnp.abs(excess - unit * numbers) < jnp.abs(excess), found - unit, found)


def _units(magnitude: Int[Array, "*V D"], exponent: int) -> Int[Array, "*V D"]:
    """The whole number of `2^exponent` nearest to a float32 of those bits, ties to even; it is below `2^22`."""
    significand = (magnitude & 0x7FFFFF) | 0x800000
    shift = jnp.minimum(150 + exponent - (magnitude >> 23), 25)  # from 25 on nothing is left
    even = (significand >> shift) & 1
    return (significand + ((1 << (shift - 1)) - 1) + even) >> shift


def _nearest(scaled: Float[Array, "*V D"], dtype: Any) -> Shaped[Array, "*V D"]:
    """The nearest number that the dtype holds, ties to even; magnitudes are at most its largest."""
    bits = _bits(scaled)
    magnitude = bits & 0x7FFFFFFF
    if jnp.dtype(dtype) == jnp.int8:
        whole = _units(magnitude, 0)
        return jnp.where(bits < 0, -whole, whole).astype(jnp.int8)
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) & ~0xFFFFF
    small = _bits(_units(magnitude, -9).astype(jnp.float32) * np.float32(2.0**-9))  # subnormal in the dtype
    rounded = jnp.where(magnitude < (127 - 6) << 23, small, normal)
    return _float(rounded | (bits & ~0x7FFFFFFF)).astype(dtype)


def quantised(values: Float[Array, "*V D"], dtype: Any) -> tuple[Shaped[Array, "*V D"], Float[Array, "*V 1"]]:
    """`pages.stored` for a dtype that has scales, from float32; the scales keep their axis."""
    name = jnp.dtype(dtype).name
    finite = (_bits(values) & 0x7FFFFFFF) < 0x7F800000
    most = jnp.max(jnp.where(finite, jnp.abs(values), np.float32(np.inf)), axis=-1, keepdims=True)
    scales = jnp.maximum(most * np.float32(1 / LARGEST[name]), np.float32(SMALLEST_SCALE[name]))
    usable = jnp.broadcast_to(most, values.shape) < np.float32(np.inf)
    scaled = jnp.where(usable, values * reciprocal(scales), np.float32(0))
    scales = jnp.where(most < np.float32(np.inf), scales, np.float32(np.nan))
    return _nearest(scaled, dtype), scales


def converted(
    numbers: Shaped[Array, "*V D"], scales: Float[Array, "*V 1"] | None, dtype: Any
) -> tuple[Shaped[Array, "*V D"], Float[Array, "*V 1"] | None]:
    """`blocks.encoded` of vectors, where the dtype is another than theirs."""
    values = numbers.astype(jnp.int32).astype(jnp.float32) if numbers.dtype == jnp.int8 else numbers.astype(jnp.float32)
    if scales is not None:
        values = values * scales
    if jnp.dtype(dtype).name in LARGEST:
        return quantised(values, dtype)
    return values.astype(dtype), None
