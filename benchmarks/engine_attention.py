"""`attention`: a layer's paged attention against torch's scaled_dot_product_attention, whose keys lie in one piece."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from engine_timing import Contestant, interleaved, peer, speedup
from measure import say

HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS = 9, 3, 64, 16
CASES = (
    # batch, new tokens, tokens before, tokens that the page table can hold
    (1, 1, 63, 8192),
    (8, 1, 63, 8192),
    (1, 1, 8191, 8192),
    (8, 1, 8191, 8192),
    (1, 512, 0, 512),
    (1, 2048, 0, 2048),
    (1, 512, 1536, 2048),
)
SHORT_CASES = ((2, 1, 40, 64), (1, 32, 32, 64))
ROUNDS = 12


def run(_out: Path, options: argparse.Namespace) -> dict[str, Any]:
    torch = peer("torch")
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for batch, width, before, capacity in CASES if options.model == "smollm2" else SHORT_CASES:
        for dtype in ("float32", "bfloat16"):
            say(f"attention: {batch} x {width} tokens after {before}, {dtype}")
            contestants = {
                "mcjax": _ours(batch, width, before, capacity, dtype),
                "torch": _theirs(torch, batch, width, before + width, dtype),
            }
            timings = interleaved(contestants, options.rounds or ROUNDS)
            rows.append(
                {
                    "batch": batch,
                    "tokens": width,
                    "before_tokens": before,
                    "capacity_tokens": capacity,
                    "dtype": dtype,
                    "steps": {name: timing.row() for name, timing in timings.items()},
                    "ratio": speedup(timings["mcjax"], timings["torch"]),
                }
            )
    return {"rows": rows}


def _ours(batch: int, width: int, before: int, capacity: int, dtype: str) -> Contestant:
    import jax
    import jax.numpy as jnp

    from mcjax.kernels.attention.blockwise import paged_attention as attend
    from mcjax.kernels.attention.pages import page_dtype

    each = capacity // PAGE_TOKENS
    pages = jnp.zeros(
        (batch * each + 1, 1, 2, PAGE_TOKENS, KV_HEADS, HEAD_DIM),
        page_dtype(dtype, "tokens_first", jax.default_backend()),
    )
    # Shuffled, as pages are after a while.
    table = jax.random.permutation(jax.random.key(0), batch * each).reshape(batch, each).astype(jnp.int32)
    queries = jax.random.normal(jax.random.key(1), (batch, width, HEADS, HEAD_DIM), dtype)
    positions = jnp.broadcast_to(before + jnp.arange(width, dtype=jnp.int32), (batch, width))
    program = jax.jit(lambda queries, pages, table, positions: attend(queries, pages, 0, table, positions))
    return Contestant(lambda: program(queries, pages, table, positions).block_until_ready())


def _theirs(torch: Any, batch: int, width: int, context: int, dtype: str) -> Contestant:
    kind = getattr(torch, dtype)
    queries = torch.randn(batch, HEADS, width, HEAD_DIM, dtype=kind)
    keys, values = (torch.randn(batch, KV_HEADS, context, HEAD_DIM, dtype=kind) for _ in range(2))
    mask = None
    if 1 < width < context:
        mask = torch.ones(width, context, dtype=torch.bool).tril(context - width)
    attend = torch.nn.functional.scaled_dot_product_attention

    def step() -> None:
        with torch.inference_mode():
            attend(queries, keys, values, attn_mask=mask, is_causal=width == context and width > 1, enable_gqa=True)

    return Contestant(step)
