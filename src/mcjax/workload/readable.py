"""The facts of a workload in words: lines of a two-column table."""

from __future__ import annotations

import math
from typing import Any


def rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """`analysis.of_played`'s facts as `(what, value with its unit)`."""
    reuse, partial = facts["reuse"], facts["reuse_with_partial"]
    lines = [
        ("workload", facts["workload"]),
        ("requests", shown(facts["requests"])),
        ("sessions", shown(facts["sessions"])),
        ("from first to last arrival", _seconds(facts["duration_s"])),
        ("arrival rate", f"{shown(facts['rate_per_s'])} requests/s"),
        ("gaps between sessions", f"coefficient of variation {shown(facts['arrival_cv'])} (1: Poisson)"),
        ("prompts", _spread(facts["input_tokens"], "tokens")),
        ("answers", _spread(facts["output_tokens"], "tokens")),
        ("block size", f"{shown(facts['block_tokens'])} tokens"),
        ("full blocks in prompts", f"{shown(reuse['block_references'])} ({shown(reuse['unique_blocks'])} different)"),
        ("blocks used once", shown(reuse["blocks_referenced_once"])),
        ("most used block", f"{shown(reuse['hottest_block_references'])} times"),
        ("an infinite cache has", f"{_hits(reuse)}: no policy can have more"),
        ("since a block's last use", _spread(reuse["gap_s"], "s")),
        ("different blocks in between", _spread(reuse["distance_blocks"], "blocks")),
        (
            "with partial last blocks",
            f"{shown(partial['block_references'])} blocks ({shown(partial['unique_blocks'])} different); "
            f"an infinite cache has {_hits(partial)}",
        ),
    ]
    if "cost" in facts:
        lines += [
            ("prefill without any cache", f"{_seconds(facts['prefill_s'])} of one instance (cost={facts['cost']})"),
            ("which keeps busy", f"{shown(facts['offered_load'])} instances"),
            ("and with an infinite cache", f"{shown(facts['offered_load_with_infinite_cache'])} instances"),
        ]
    return lines


def shown(value: float) -> str:
    """A number as people read it."""
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "unknown"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _spread(values: dict[str, float], unit: str) -> str:
    if not values:
        return "none"
    return ", ".join(f"{name} {shown(value)}" for name, value in values.items()) + f" {unit}"


def _hits(reuse: dict[str, Any]) -> str:
    return f"{reuse['block_hit']:.1%} of them and {reuse['token_hit']:.1%} of prompt tokens".replace("%", " %")


def _seconds(seconds: float) -> str:
    """With minutes, hours or days beside, where there are two or more."""
    for unit, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{shown(seconds)} s ({seconds / unit:.3g} {name})"
    return f"{shown(float(seconds))} s"
