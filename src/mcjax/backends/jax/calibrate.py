"""Measures an executor's steps on this machine, for the cost model that the conductor's estimates are made with."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import numpy as np

from mcjax.backends.jax.executor import JaxExecutor
from mcjax.backends.jax.plans import Plan
from mcjax.backends.jax.programs import Geometry, pack_row
from mcjax.cost.padded import Padded
from mcjax.types import Recorder

REPEATS = 5
LINK_BYTES = 1 << 25


async def calibrate(prefill: JaxExecutor, decode: JaxExecutor, recorder: Recorder) -> Padded:
    """Time chunks on one executor and steps on another (or the same), at both ends of the context and of the batch.

    Medians of a few, after warm-up. Overwrites pages: call it before anyone owns one. The constants are recorded as the
    only outcome of the mechanism `calibration`, so that a replay estimates with the same ones.
    """
    chunk_ns = await prefill.on_thread(lambda: time_chunks(prefill))
    one_ns, full_ns, far_ns = await decode.on_thread(lambda: time_steps(decode))
    found = fit(prefill.geometry, chunk_ns, (one_ns, full_ns), far_ns)
    recorder.outcome(0, "calibration", 0, dataclasses.asdict(found))
    return found


def fit(geometry: Geometry, chunk_ns: tuple[float, float], step_ns: tuple[float, float], far_step_ns: float) -> Padded:
    """Constants from a full chunk at the (start, end) of the context, a step at batch (1, max), one with full contexts.

    Differences that come out negative are noise: such a constant is 0 and the others carry its share.
    """
    chunk = min(geometry.chunk_tokens, geometry.max_context_tokens)
    context, batch = geometry.max_context_tokens, geometry.max_batch
    near, far = chunk_ns
    per_end = max(0.0, (far - near) / (context - chunk)) if context > chunk else 0.0
    one, full = step_ns
    per_sequence = max(0.0, (full - one) / (batch - 1)) if batch > 1 else 0.0
    per_token = max(0.0, (far_step_ns - full) / (context - 1)) if context > 1 else 0.0
    return Padded(
        name="calibrated",
        chunk_tokens=chunk,
        chunk_base_ns=max(0, round(near - per_end * chunk if per_end else (near + far) / 2)),
        chunk_ps_per_context_token=round(per_end * 1000),
        decode_base_ns=max(0, round(one - per_sequence)),
        decode_ns_per_sequence=round(per_sequence),
        decode_ps_per_context_token=round(per_token * 1000),
    )


def _pages(geometry: Geometry) -> list[int]:
    """A full page table. Only the time is looked at, so pages may repeat where there are fewer than a context takes."""
    return [page % geometry.pages for page in range(geometry.table_width)]


def time_chunks(executor: JaxExecutor) -> tuple[float, float]:
    """Nanoseconds of a full chunk at the (start, end) of the context. On the executor's thread."""
    geometry = executor.geometry
    chunk = min(geometry.chunk_tokens, geometry.max_context_tokens)

    def at(start: int) -> float:
        tokens = np.zeros(chunk, dtype=np.int32)
        call = Plan.idle(geometry, 1, geometry.chunk_tokens)
        call.rows[0] = pack_row(geometry.chunk_tokens, chunk, start, tokens, _pages(geometry), geometry)
        return _median_ns(lambda: executor.step(call))

    return at(0), at(geometry.max_context_tokens - chunk)


def time_steps(executor: JaxExecutor) -> tuple[float, float, float]:
    """Nanoseconds of a step with one short context, with a full batch of them, and with a full batch of the longest
    ones. On the executor's thread."""
    geometry = executor.geometry

    def at(batch: int, start: int) -> float:
        call = Plan.idle(geometry, geometry.max_batch, 1)
        call.rows[:batch] = pack_row(1, 1, start, np.zeros(1, dtype=np.int32), _pages(geometry), geometry)
        return _median_ns(lambda: executor.step(call))

    return at(1, 0), at(geometry.max_batch, 0), at(geometry.max_batch, geometry.max_context_tokens - 1)


def _median_ns(work: Callable[[], object]) -> float:
    work()
    times: list[int] = []
    for _ in range(REPEATS):
        start = time.perf_counter_ns()
        work()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times)


def measure_link(recorder: Recorder) -> tuple[float, float]:
    """Bytes a second of a copy between two host buffers (the `local` transport's work), and its fixed cost in seconds.

    Recorded as the only outcome of the mechanism `link`.
    """
    source = np.ones(LINK_BYTES, np.uint8)
    target = np.zeros(LINK_BYTES, np.uint8)
    small, large = source[:64], target[:64]
    whole_ns = _median_ns(lambda: np.copyto(target, source))
    fixed_ns = _median_ns(lambda: np.copyto(large, small))
    found = (LINK_BYTES / max(1.0, whole_ns) * 1e9, fixed_ns / 1e9)
    recorder.outcome(0, "link", 0, {"bytes_per_s": found[0], "latency_s": found[1]})
    return found
