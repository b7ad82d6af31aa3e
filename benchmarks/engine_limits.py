"""`limits`: what this machine's memory and cores give at most, by the fastest of what is at hand."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from engine_timing import Contestant, interleaved, peer

READ_BYTES = 512 * 2**20
"""Read at once: many times the last cache."""
SIDE = 2048
"""Rows and columns of the multiplied matrices."""
ROUNDS = 12


def run(_out: Path, options: argparse.Namespace) -> dict[str, Any]:
    return {"limits": measure(options)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes a second of a sum over an array, floating-point operations a second of a square product, by library.

    `dram_bytes_per_s` and `flops_per_s` (by dtype) are the fastest of each.
    """
    import jax
    import jax.numpy as jnp

    torch = peer("torch")
    torch.set_num_threads(options.threads)
    rounds = min(options.rounds or ROUNDS, ROUNDS)
    array = torch.ones(READ_BYTES // 4)
    same = jnp.asarray(array.numpy())
    total = jax.jit(jnp.sum)
    sums = {"torch": Contestant(array.sum), "jax": Contestant(lambda: total(same).block_until_ready())}
    bytes_per_s = {name: READ_BYTES / timing.best_s for name, timing in interleaved(sums, rounds).items()}
    flops_per_s: dict[str, dict[str, float]] = {}
    product = jax.jit(lambda x, y: jnp.matmul(x, y, precision="highest", preferred_element_type=jnp.float32))
    for dtype in ("float32", "bfloat16"):
        ours = jnp.ones((SIDE, SIDE), dtype)
        theirs = torch.ones((SIDE, SIDE), dtype=getattr(torch, dtype))
        contestants = {
            "torch": Contestant(lambda theirs=theirs: theirs @ theirs),
            "jax": Contestant(lambda ours=ours: product(ours, ours).block_until_ready()),
        }
        timings = interleaved(contestants, rounds)
        flops_per_s[dtype] = {name: 2 * SIDE**3 / timing.best_s for name, timing in timings.items()}
    return {
        "read_bytes_per_s": bytes_per_s,
        "product_flops_per_s": flops_per_s,
        "dram_bytes_per_s": max(bytes_per_s.values()),
        "flops_per_s": {dtype: max(found.values()) for dtype, found in flops_per_s.items()},
    }
