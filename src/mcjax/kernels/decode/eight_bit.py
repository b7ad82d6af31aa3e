"""Pairs of eight-bit numbers in words of 16 bits, and how a GPU makes them bfloat16 with few instructions.

A kernel that reads eight-bit pages has half the time for each number that one of bfloat16 pages has. XLA's conversions
go number by number, and those of fp8 to a unit of a quarter of the speed; these do two numbers an instruction. Tensor
cores, too, take their operands from shared memory in words of 16 bits, and transpose no smaller ones.

* int8 (`n`): 0x4300 is 128 in bfloat16, whose last bit is worth one from there to 255. So the lower seven bits of `n`
  after it are 128 + n, or 256 + n where `n` is negative; the sign bit after it is 128 or 256. Their difference is `n`.
* fp8 e4m3: exponent and fraction, moved to where those of bfloat16 end, are the number times 2^-120: the two formats'
  exponents are 7 and 127 too large. That holds for its subnormal numbers, which bfloat16 then has as such.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, BFloat16, Float, Int16, Shaped

ASSEMBLY = {
    "int8": (
        """{
            .reg .b32 number, sign;
            lop3.b32 number, $1, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 sign, $1, 0x00800080, 0x43004300, 0xEA;
            sub.rn.bf16x2 $0, number, sign;
        }""",
        """{
            .reg .b32 number, sign;
            shr.u32 sign, $1, 8;
            lop3.b32 number, sign, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 sign, sign, 0x00800080, 0x43004300, 0xEA;
            sub.rn.bf16x2 $0, number, sign;
        }""",
    ),
    "float8_e4m3fn": (
        """{
            .reg .b32 number, sign;
            shl.b32 number, $1, 4;
            and.b32 number, number, 0x07F007F0;
            shl.b32 sign, $1, 8;
            lop3.b32 number, sign, 0x80008000, number, 0xEA;
            mov.b32 sign, 0x7B807B80;
            mul.rn.bf16x2 $0, number, sign;
        }""",
        """{
            .reg .b32 number, sign;
            shr.u32 number, $1, 4;
            and.b32 number, number, 0x07F007F0;
            lop3.b32 number, $1, 0x80008000, number, 0xEA;
            mov.b32 sign, 0x7B807B80;
            mul.rn.bf16x2 $0, number, sign;
        }""",
    ),
}
"""PTX for sm_90, by dtype: of two words ($1) the lower numbers ($0), and the upper ones. 0xEA is `(a & b) | c`."""


def paired(data: Shaped[Array, "*V D"]) -> Int16[Array, "*V D/2"]:
    """Two neighbours as one word, the first one in its lower half. XLA moves nothing for it."""
    return lax.bitcast_convert_type(data.reshape(*data.shape[:-1], -1, 2), jnp.int16)


def taken_apart(words: Int16[Array, "*W"], dtype: Any) -> tuple[Float[Array, "*W"], Float[Array, "*W"]]:
    """The lower and the upper numbers of words, by ordinary conversions."""
    lower, upper = (lax.bitcast_convert_type((words >> bits).astype(jnp.int8), dtype) for bits in (0, 8))
    return lower.astype(jnp.float32), upper.astype(jnp.float32)


def taken_apart_by_assembly(
    words: Int16[Array, "*W"], dtype: Any
) -> tuple[BFloat16[Array, "*W"], BFloat16[Array, "*W"]]:
    """The same, exact in bfloat16; only on a GPU."""
    shape = jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)

    def half(assembly: str) -> Array:
        return pltriton.elementwise_inline_asm(
            assembly, args=[words], constraints="=r,r", pack=2, result_shape_dtypes=[shape]
        )[0]

    lower, upper = ASSEMBLY[jnp.dtype(dtype).name]
    return half(lower), half(upper)
