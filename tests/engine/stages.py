"""Where a request is at a moment, read off the chain of coroutines that its task waits in."""

from __future__ import annotations

import asyncio
from typing import Any

STAGES = (
    ("_write_back", "writing back"),
    ("_pages_again", "swapped out"),
    ("_swap", "swapping"),
    ("_decode", "decoding"),
    ("_load", "loading to decode"),
    ("decode", "handed over, waiting for pages"),
    ("compute_prompt", "computing"),
    ("_compute", "streaming the last blocks"),
    ("load_prefix", "loading the prefix"),
    ("take", "waiting for pages"),
    ("reserve_at", "waiting for room in a pool"),
    ("_pull", "fetching the prefix"),
    ("serve", "between attempts"),
)
"""The innermost of these functions says the stage; several outputs are awaited elsewhere, and count as decoding."""


def stage_of(task: asyncio.Task[Any]) -> str:
    names: list[str] = []
    inner: Any = task.get_coro()
    while inner is not None:
        code = getattr(inner, "cr_code", None)
        if code is not None:
            names.append(code.co_name)
        inner = getattr(inner, "cr_await", None)
    if "generate" in names and "_to_end" not in names:
        return "decoding"
    return next((stage for name, stage in STAGES if name in names), "not begun")
