"""Runs with figures as a test wants them, without a simulation: what a comparison reads of a run, and no more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from track_fixtures import key_of, row

from mcjax.track.record import RunRecord
from mcjax.track.recorder import TableRecorder
from mcjax.track.run import Run
from mcjax.track.summary import summarise
from mcjax.types import RequestState

MS = 1_000_000


def summarised(config: Mapping[str, Any], digest: str = "", seed: int = 0, slice_: int = 0, **figures: Any) -> Run:
    """A run that has only figures; `ttft_s={"p90": 1}` and so on."""
    summary = {"requests": {"submitted": 100, "completed": 100, "rejected": 0, "failed": 0}, **figures}
    record = RunRecord(config={**config, "seed": seed, "slice": slice_})
    return Run(None, {**summary, "digest": digest}, {}, {}, record=record)


def policies(values: Mapping[str, Iterable[float]], name: str = "ttft_s", part: str = "p90") -> list[Run]:
    """For each policy a run a seed with one figure."""
    return [
        summarised({"sched.prefill": policy}, f"{policy} {seed}", seed, 0, **{name: {part: value}})
        for policy, own in values.items()
        for seed, value in enumerate(own)
    ]


def served(
    ttft_ms: Sequence[float],
    policy: str = "a",
    seed: int = 0,
    arrivals_ms: Sequence[float] | None = None,
    warmup_ms: int = 0,
    **fields: Any,
) -> Run:
    """A run with requests whose first tokens came after `ttft_ms`, every fifth rejected, of two tenants."""
    recorder = TableRecorder(key_of)
    arrivals = [10.0 * index for index in range(len(ttft_ms))] if arrivals_ms is None else arrivals_ms
    for index, (at_ms, wait_ms) in enumerate(zip(arrivals, ttft_ms, strict=True)):
        at_ns, first_ns = round(at_ms * MS), round((at_ms + wait_ms) * MS)
        state = RequestState.REJECTED if index % 5 == 4 else RequestState.COMPLETED
        ends = [] if state is RequestState.REJECTED else [first_ns, first_ns + (index % 7 + 1) * MS, first_ns + 9 * MS]
        made = row(index, at_ns, ends, state, slo_ttft_s=0.02, slo_tbt_s=0.0065, **fields)
        made.request = replace(made.request, tenant="ab"[index % 2])
        made.prefill_start_ns = -1 if state is RequestState.REJECTED else at_ns
        made.local_tokens, made.remote_tokens = index % 50, index % 30
        recorder.request(made)
    tables = recorder.tables()
    summary = summarise(
        tables,
        backend="sim",
        seed=seed,
        wall_s=1.0,
        duration_ns=round((max(arrivals) + 100) * MS),
        warmup_ns=warmup_ms * MS,
        block_tokens=32,
    )
    config = {"seed": seed, "slice": 0, "sched.prefill": policy, "track.warmup_s": warmup_ms / 1e3}
    return Run(None, summary, {}, tables, record=RunRecord(config=config))


def waits_ms(count: int, mean_ms: float, seed: int) -> list[float]:
    return np.random.default_rng(seed).exponential(mean_ms, count).tolist()
