"""The steps of a real run, read back from its tables: what each computed, how long it took, and who ran beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.app.validation.found import quantiles, spread_of
from mcjax.cost.measured import LASTING_NS, Copies, Measured, Overheads
from mcjax.track.run import Run

KINDS = ("prefill", "decode")
OTHER = {"prefill": "decode", "decode": "prefill"}
MOSTLY_ALONE, MOSTLY_BESIDE = 0.1, 0.9
"""Shares of a step's time beside the other kind, up to and from which it counts as one of the two."""
ENOUGH = 10
"""Steps that a figure is taken from."""

LONGEST_GAP_NS = 20_000_000
"""Between two steps of an instance that has work; a longer one says that it had none."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `context` is the longest row's; `shared` is the part of its time in which the other kind ran."""

    kind: str
    start_ns: int
    end_ns: int
    cached: int
    length: int
    batch: int
    context: int
    shared: float

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


def steps_of(run: Run) -> list[Step]:
    """Every chunk and every decode step, in order of time. Of requests that were computed once, as all are here."""
    events, requests = _step_events(run), _requests(run)
    chunks, decodes = _intervals(events, "prefill_step"), _intervals(events, "decode_step")
    return sorted(
        [*_chunks(events, requests, decodes), *_decode_steps(events, requests, chunks)], key=lambda step: step.start_ns
    )


def predicted_ns(cost: Measured, step: Step) -> float:
    """What the cost model expects of a step, given who ran beside it."""
    slower = cost.machine.slowdown.get(step.kind, {}).get(OTHER[step.kind], 1.0)
    return step_alone_ns(cost, step) / (step.shared / slower + 1 - step.shared)


def step_alone_ns(cost: Measured, step: Step) -> float:
    """The same, had it had the machine to itself."""
    if step.kind == "prefill":
        return float(cost.prefill_ns(step.cached, step.length))
    return float(cost.step_ns(step.batch, step.batch * step.context, 1)[0])


def refitted(cost: Measured, steps: Sequence[Step], overheads: Overheads) -> Measured:
    """The cost with the step times of a run: what error is left is not that of the steps.

    Every measured point is scaled by what its kind (and, of decode, its batch) took in the run over what was expected;
    slowdown, spread and hand-offs are the run's. Copies and sizes stay.
    """
    machine = cost.machine
    batches = sorted({row.batch for row in machine.steps if row.kind == "decode"})
    ratios: dict[tuple[str, int], list[float]] = {}
    beside: dict[str, list[float]] = {}
    for step in steps:
        alone = step_alone_ns(cost, step)
        if step.shared <= MOSTLY_ALONE:
            ratios.setdefault((step.kind, _at(batches, step.batch)), []).append(step.duration_ns / alone)
    scales = {key: median(values) for key, values in ratios.items() if len(values) >= ENOUGH}
    whole = {kind: median([r for key, rs in ratios.items() if key[0] == kind for r in rs] or [1.0]) for kind in KINDS}

    def scale(kind: str, batch: int) -> float:
        return scales.get((kind, batch if kind == "decode" else 0), whole[kind])

    rows = tuple(replace(row, seconds=row.seconds * scale(row.kind, row.batch)) for row in machine.steps)
    for step in steps:
        if step.shared >= MOSTLY_BESIDE:
            expected = step_alone_ns(cost, step) * scale(step.kind, _at(batches, step.batch))
            beside.setdefault(step.kind, []).append(step.duration_ns / expected)
    slowdown = {
        kind: {other: max(1.0, median(beside[kind])) if len(beside.get(kind, ())) >= ENOUGH else 1.0}
        for kind, other in OTHER.items()
    }
    fitted = Measured(replace(machine, steps=rows, slowdown=slowdown), cost.name)
    left: dict[str, dict[int, list[float]]] = {}
    for step in steps:
        together = left.setdefault(step.kind, {}).setdefault(step.start_ns // LASTING_NS, [])
        together.append(step.duration_ns / predicted_ns(fitted, step))
    spread = {kind: spread_of(list(groups.values())) for kind, groups in left.items()}
    return Measured(replace(fitted.machine, spread=spread, overheads=overheads), cost.name)


def _at(batches: Sequence[int], batch: int) -> int:
    """The measured batch that a step of `batch` belongs to; 0 for a chunk."""
    return next((size for size in batches if size >= batch), batches[-1]) if batch else 0


def overheads_of(runs: Sequence[Run], copies: Copies, page_tokens: int) -> Overheads:
    """What passed between mechanisms in real runs, over all of them: medians, and how far from them it was."""
    gaps: dict[str, list[int]] = {"prefill_step": [], "decode_step": []}
    waits: list[int] = []
    hops: list[int] = []
    for run in runs:
        events, transfers = _step_events(run), _transfers(run)
        for kind, gap in _gaps(events, transfers):
            gaps[kind].append(gap)
        for row in transfers:
            if row["detail"] == "local":
                moving_ns = copies.between_hosts.at(int(row["blocks"]))
                hops.append(int(row["time_ns"]) - int(row["start_ns"]) - moving_ns)
        waits += _waits(run, events, copies, page_tokens)
    chunk, step = gaps["prefill_step"], gaps["decode_step"]
    prefill_ns, decode_ns = median(chunk or step or [0]), median(step or chunk or [0])
    copy_ns = max(0.0, median(hops or [0]))
    idle_ns = max(prefill_ns, median(waits or [0]) - copy_ns)
    ratios = [
        gap / median(gaps) for gaps in (chunk, step, hops) if len(gaps) >= ENOUGH and median(gaps) > 0 for gap in gaps
    ]
    factors = quantiles([max(0.0, ratio) for ratio in ratios] or [1.0])
    return Overheads(round(idle_ns), round(prefill_ns), round(decode_ns), round(copy_ns), factors)


def _gaps(events: Sequence[dict[str, Any]], transfers: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    """Between plans of one instance with nothing in between but the event loop."""
    ends_ns: dict[str, list[int]] = {}
    for row in transfers:
        if row["detail"] == "device":
            ends_ns.setdefault(str(row["place"]).split(">")[0], []).append(int(row["time_ns"]))
    found: list[tuple[str, int]] = []
    for place in dict.fromkeys(str(row["place"]) for row in events):
        disturbed = np.array(sorted(ends_ns.get(f"node-{place}", [])), np.int64)
        for before, after in pairwise([row for row in events if row["place"] == place]):
            first, second = int(before["time_ns"]), int(after["start_ns"])
            same_prompt = before["request_id"] == after["request_id"]
            busy = same_prompt if before["kind"] == "prefill_step" else min(before["blocks"], after["blocks"]) > 1
            if before["kind"] != after["kind"] or not busy or not 0 <= second - first <= LONGEST_GAP_NS:
                continue
            if disturbed.searchsorted(second + 1) == disturbed.searchsorted(first):
                found.append((str(before["kind"]), second - first))
    return found


def _waits(run: Run, events: Sequence[dict[str, Any]], copies: Copies, page_tokens: int) -> list[int]:
    """From arrival to the first chunk, without the copy of the cached prefix, where the instance had nothing to do."""
    ends_ns: dict[str, NDArray[np.int64]] = {}
    for row in events:
        if row["kind"] == "prefill_step" and row["place"] not in ends_ns:
            own = [int(r["time_ns"]) for r in events if r["place"] == row["place"] and r["kind"] == "prefill_step"]
            ends_ns[str(row["place"])] = np.array(sorted(own), np.int64)
    found: list[int] = []
    columns = ["arrival_ns", "prefill_start_ns", "prefill_instance", "local_tokens"]
    for row in run.requests.select(columns).to_pylist():
        arrival, start = int(row["arrival_ns"]), int(row["prefill_start_ns"])
        others = ends_ns.get(str(row["prefill_instance"]))
        if others is None or others.searchsorted(start + 1) != others.searchsorted(arrival):
            continue
        blocks = -(-int(row["local_tokens"]) // page_tokens)
        found.append(start - arrival - (copies.onto_device.at(blocks) if blocks else 0))
    return found


def _transfers(run: Run) -> list[dict[str, Any]]:
    columns = ["kind", "place", "start_ns", "time_ns", "blocks", "detail"]
    return [row for row in run.events.select(columns).to_pylist() if row["kind"] == "transfer"]


def _step_events(run: Run) -> list[dict[str, Any]]:
    columns = ["kind", "place", "request_id", "start_ns", "time_ns", "blocks", "tokens"]
    rows: list[dict[str, Any]] = run.events.select(columns).to_pylist()
    return sorted((row for row in rows if str(row["kind"]).endswith("_step")), key=lambda row: row["start_ns"])


def _requests(run: Run) -> dict[int, dict[str, Any]]:
    columns = ["request_id", "prompt_tokens", "first_token_ns", "intervals_ns"]
    rows: list[dict[str, Any]] = run.requests.select(columns).to_pylist()
    return {int(row["request_id"]): row for row in rows}


def _intervals(events: Sequence[dict[str, Any]], kind: str) -> NDArray[np.int64]:
    """`[n, 2]`: start and end of every step of a kind, on any instance, overlaps united."""
    merged: list[list[int]] = []
    for row in events:
        if row["kind"] != kind:
            continue
        start, end = int(row["start_ns"]), int(row["time_ns"])
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return np.array(merged, np.int64).reshape(-1, 2)


def _shared(start_ns: int, end_ns: int, others: NDArray[np.int64]) -> float:
    """The part of an interval that lies inside the others."""
    first, last = others[:, 1].searchsorted(start_ns), others[:, 0].searchsorted(end_ns)
    near = others[first:last]
    inside = np.minimum(near[:, 1], end_ns) - np.maximum(near[:, 0], start_ns)
    return float(np.maximum(inside, 0).sum()) / max(1, end_ns - start_ns)


def _chunks(
    events: Sequence[dict[str, Any]], requests: dict[int, dict[str, Any]], others: NDArray[np.int64]
) -> list[Step]:
    found: list[Step] = []
    ends = {request_id: int(row["prompt_tokens"]) for request_id, row in requests.items()}
    for row in reversed(events):  # the last chunk of a prompt ends with it, and each one where the next begins
        request_id = int(row["request_id"])
        if row["kind"] != "prefill_step" or request_id not in ends:
            continue
        length = int(row["tokens"])
        ends[request_id] -= length
        start_ns, end_ns = int(row["start_ns"]), int(row["time_ns"])
        shared = _shared(start_ns, end_ns, others)
        found.append(Step("prefill", start_ns, end_ns, ends[request_id], length, 0, 0, shared))
    return found


def _decode_steps(
    events: Sequence[dict[str, Any]], requests: dict[int, dict[str, Any]], others: NDArray[np.int64]
) -> list[Step]:
    """The steps of each plan: their ends are the times of the tokens that they gave."""
    prompts: list[int] = []
    times: list[NDArray[np.int64]] = []
    for row in requests.values():
        intervals = row["intervals_ns"]
        if intervals:
            prompts.append(int(row["prompt_tokens"]))
            times.append(int(row["first_token_ns"]) + np.cumsum(np.array([0, *intervals], np.int64)))
    found: list[Step] = []
    for row in events:
        if row["kind"] != "decode_step":
            continue
        start_ns, end_ns = int(row["start_ns"]), int(row["time_ns"])
        longest, ends_ns = 0, np.zeros(0, np.int64)
        for prompt, own in zip(prompts, times, strict=True):
            if own[-1] <= start_ns or own[0] >= end_ns:
                continue
            before = int(own.searchsorted(start_ns, side="right"))
            after = int(own.searchsorted(end_ns, side="right"))
            if before == 0 or after == before:
                continue
            longest = max(longest, prompt + before - 1)
            ends_ns = own[before:after] if after - before > len(ends_ns) else ends_ns
        for number, (first, last) in enumerate(zip([start_ns, *ends_ns[:-1].tolist()], ends_ns.tolist(), strict=True)):
            shared = _shared(first, last, others)
            found.append(Step("decode", first, last, 0, 0, int(row["blocks"]), longest + number, shared))
    return found
