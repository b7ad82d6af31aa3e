"""`decode` and `prefill`: one step of the model, against transformers on torch and against the machine's limits."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import engine_limits
from engine_timing import Contestant, Timing, interleaved, speedup
from measure import say

DTYPES = ("float32", "bfloat16")
BATCHES = (1, 8, 32)
PROMPTS = (512, 2048)
DECODE_ROUNDS = 24
PREFILL_ROUNDS = 5


def decode(_out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One token of each sequence of a batch. The limit is the time to read weights, keys and values once."""
    limits = engine_limits.measure(options)
    batches = options.batches or BATCHES
    contestants = _contestants(options, [(batch, 1, options.context) for batch in batches])
    rows: list[dict[str, Any]] = []
    for batch in batches:
        say(f"decode: {batch} sequences")
        case = contestants[batch, 1, options.context]
        timings = interleaved(case.steps, options.rounds or DECODE_ROUNDS)
        limits_s = {
            dtype: ours.read_bytes(batch, options.context + 1) / limits["dram_bytes_per_s"]
            for dtype, ours in case.ours.items()
        }
        rows.append({"batch": batch, "context_tokens": options.context, **_compared(timings, batch, limits_s)})
    return {"model": options.model, "limits": limits, "rows": rows}


def prefill(_out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A whole prompt in one chunk. The limit is the time of its operations at the speed of a square product."""
    limits = engine_limits.measure(options)
    prompts = options.prompts or PROMPTS
    contestants = _contestants(options, [(1, tokens, 0) for tokens in prompts])
    rows: list[dict[str, Any]] = []
    for tokens in prompts:
        say(f"prefill: {tokens} tokens")
        case = contestants[1, tokens, 0]
        timings = interleaved(case.steps, options.rounds or PREFILL_ROUNDS)
        limits_s = {dtype: ours.flops(tokens) / limits["flops_per_s"][dtype] for dtype, ours in case.ours.items()}
        rows.append({"prompt_tokens": tokens, **_compared(timings, tokens, limits_s)})
    return {"model": options.model, "limits": limits, "rows": rows}


class _Case:
    def __init__(self, ours: dict[str, Any], steps: dict[str, Contestant]):
        self.ours = ours
        self.steps = steps


def _contestants(options: argparse.Namespace, shapes: list[tuple[int, int, int]]) -> dict[Any, _Case]:
    """For each (batch, width, start): the steps of both sides in both dtypes."""
    from engine_models import SMOLLM2, TINY, Ours, Theirs

    sizes = SMOLLM2 if options.model == "smollm2" else TINY
    ours = {dtype: Ours(sizes, dtype) for dtype in DTYPES}
    theirs = {dtype: Theirs(sizes, dtype, options.threads) for dtype in DTYPES}
    cases: dict[Any, _Case] = {}
    for shape in shapes:
        steps: dict[str, Contestant] = {}
        for dtype in DTYPES:
            steps[f"mcjax {dtype}"] = ours[dtype].step(*shape)
            steps[f"torch {dtype}"] = theirs[dtype].step(*shape)
        cases[shape] = _Case(ours, steps)
    return cases


def _compared(timings: dict[str, Timing], tokens: int, limits_s: dict[str, float]) -> dict[str, Any]:
    """Times, tokens a second, ratios at equal dtype and best against best, and shares of the limit."""
    best = {
        side: min((name for name in timings if name.startswith(side)), key=lambda name: timings[name].median_s)
        for side in ("mcjax", "torch")
    }
    return {
        "steps": {name: {**timing.row(), "tokens_per_s": tokens / timing.best_s} for name, timing in timings.items()},
        "ratio": {dtype: speedup(timings[f"mcjax {dtype}"], timings[f"torch {dtype}"]) for dtype in DTYPES},
        "best_ratio": speedup(timings[best["mcjax"]], timings[best["torch"]]),
        "best": best,
        "limit_s": limits_s,
        "limit_share": {dtype: limits_s[dtype] / timings[f"mcjax {dtype}"].best_s for dtype in DTYPES},
    }
