"""Small fabricated runs whose figures can be computed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mcjax.track.record import RunRecord
from mcjax.track.recorder import TableRecorder
from mcjax.track.run import Run
from mcjax.track.summary import summarise
from mcjax.types import Request, RequestRow, RequestState

MS = 1_000_000
SECOND = 1000 * MS
RATE = "workload.rate_per_s"


def key_of(block: int) -> bytes:
    return block.to_bytes(4, "big")


def run_with(
    ttfts_ms: Sequence[int] = (10, 20, 40),
    *,
    seed: int = 0,
    slice_: int = 0,
    prefill: str = "random",
    config: Mapping[str, Any] | None = None,
    rejected: int = 0,
    interval_ms: int = 5,
    level: str = "full",
    warmup_s: float = 0.0,
    state: str = "done",
    directory: Path | None = None,
    samples: bool = True,
    hit_tokens: int = 40,
) -> Run:
    """A request every 100 ms: 100 prompt tokens, `hit_tokens` of them found (a quarter of those elsewhere), 3 out.

    Two instances, p0 and d0, and 64 bytes on the way for each request. It lasts a second a request, and one more.
    """
    recorder = TableRecorder(key_of, level)
    for index, ttft_ms in enumerate(ttfts_ms):
        arrival = 100 * MS * index
        first = arrival + ttft_ms * MS
        ends = [first, first + interval_ms * MS, first + 2 * interval_ms * MS]
        recorder.event(first, "prefill_step", index, "p0", start_ns=arrival, tokens=100)
        recorder.event(ends[-1], "decode_step", -1, "d0", start_ns=first, tokens=2)
        way = {"tier": "dram>dram", "first_block": 7, "blocks": 1, "nbytes": 64, "detail": "network"}
        recorder.event(first, "transfer", index, "node-p0>node-d0", start_ns=arrival, **way)
        row = RequestRow(Request(index, arrival, 100, 8, tenant="a", session=str(index)), blocks=(1, 2))
        row.state, row.first_token_ns, row.finish_ns, row.output_tokens = RequestState.COMPLETED, first, ends[-1], 3
        row.prefill_start_ns = arrival
        row.local_tokens, row.remote_tokens = hit_tokens - hit_tokens // 4, hit_tokens // 4
        row.token_ends_ns = [np.array(ends, np.int64)]
        row.slo_ttft_s, row.slo_tbt_s = 0.03, 1.0
        recorder.request(row)
    for index in range(rejected):
        number = len(ttfts_ms) + index
        row = RequestRow(Request(number, 0, 100, 8, tenant="a", session=str(number)), state=RequestState.REJECTED)
        recorder.request(row)
    duration_ns = SECOND * (len(ttfts_ms) + 1)
    for tick in range(1, duration_ns // (100 * MS) + 1) if samples else ():
        for name, value in (("p0", tick), ("p1", 3 * tick), ("d0", 0)):
            recorder.sample(100 * MS * tick, name, "queue_prompts", value)
            recorder.sample(100 * MS * tick, name, "batch", 2 if name == "d0" else 0)
            recorder.sample(100 * MS * tick, name, "page_fill", 0.5 if name == "p0" else 0.25)
            recorder.sample(100 * MS * tick, f"node-{name}", "pool_fill", min(1.0, tick / 100))
        recorder.sample(100 * MS * tick, "network", "moved_bytes", 1e9 * tick)
        recorder.sample(100 * MS * tick, "network", "pending_bytes", 2e9)
    tables = recorder.tables()
    summary = summarise(
        tables,
        backend="sim",
        seed=seed,
        wall_s=0.5,
        duration_ns=duration_ns,
        warmup_ns=round(warmup_s * SECOND),
        block_tokens=16,
    )
    flat = {"seed": seed, "slice": slice_, "slices": 8, **(config or {})}
    record = RunRecord(backend="sim", choices={"sched/prefill": prefill}, config=flat, run_key=f"{seed}{slice_}" * 32)
    return Run(directory, summary, {"track": {"level": level}}, tables, state, "killed" * (state != "done"), record)


def repeated(ttfts_of: Mapping[str, Sequence[Sequence[int]]], **fields: Any) -> list[Run]:
    """Runs by name of the selection: a sequence of times to first token each, on a slice each."""
    return [
        run_with(ttfts_ms, slice_=index, prefill=name, **fields)
        for name, several in ttfts_of.items()
        for index, ttfts_ms in enumerate(several)
    ]
