"""Words of two eight-bit numbers, taken apart: by conversions, and by the assembly as its instructions are defined."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mcjax.kernels.decode.eight_bit import ASSEMBLY, paired, taken_apart

OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
}


def halves(words: np.ndarray) -> np.ndarray:
    return words.astype(np.uint32).view(ml_dtypes.bfloat16)


def run(assembly: str, words: np.ndarray) -> np.ndarray:
    """What PTX of these few instructions makes of 32-bit registers, by its manual."""
    registers: dict[str, Any] = {"$1": words}
    for line in assembly.strip("{} \n").split(";")[:-1]:
        operation, _, operands = line.strip().partition(" ")
        if operation == ".reg":
            continue
        target, *sources = [operand.strip() for operand in operands.split(",")]
        values = [registers[s] if s in registers else np.uint32(int(s, 0)) for s in sources]
        if operation == "lop3.b32":
            assert int(sources[3], 0) == 0xF0 & 0xCC | 0xAA  # the table of (a & b) | c
            registers[target] = values[0] & values[1] | values[2]
        elif operation in ("sub.rn.bf16x2", "mul.rn.bf16x2"):
            left, right = (halves(np.broadcast_to(value, words.shape)).astype(np.float64) for value in values)
            exact = left - right if operation.startswith("sub") else left * right
            registers[target] = exact.astype(ml_dtypes.bfloat16).view(np.uint32)
        else:
            registers[target] = OPERATIONS[operation](*values).astype(np.uint32)
    return halves(registers["$0"])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_the_assembly_gives_every_number_exactly(dtype) -> None:
    everything = np.arange(1 << 16, dtype=np.uint16)
    bytes_of = everything.view(np.uint8).reshape(-1, 2)
    valid = (bytes_of & 0x7F != 0x7F).all(axis=1) if dtype != jnp.int8 else np.ones(1 << 16, bool)  # no NaN
    numbers = bytes_of.view(np.dtype(dtype)).astype(np.float64)
    words = np.concatenate([everything, everything[::-1]]).view(np.uint32)  # neighbours of one register differ
    wanted = np.concatenate([numbers, numbers[::-1]])
    kept = np.concatenate([valid, valid[::-1]])
    for half, assembly in enumerate(ASSEMBLY[jnp.dtype(dtype).name]):
        found = run(assembly, words).astype(np.float64)
        np.testing.assert_array_equal(found[kept], wanted[kept, half])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_words_are_neighbours_and_come_apart_again(dtype) -> None:
    numbers = jnp.arange(1, 81).reshape(5, 16).astype(dtype)
    lower, upper = taken_apart(paired(numbers), dtype)
    np.testing.assert_array_equal(lower, numbers[:, 0::2].astype(jnp.float32))
    np.testing.assert_array_equal(upper, numbers[:, 1::2].astype(jnp.float32))
