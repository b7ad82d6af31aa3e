"""The recorder that keeps everything: rows go into compact columns, and come out as Arrow tables at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import ConfigError
from mcjax.track.arrow import Table, arrow
from mcjax.track.columns import Rows
from mcjax.track.statistics import percentile_parts, ratio, tail_mean_ns
from mcjax.track.tables import QUANTITIES, SCHEMAS
from mcjax.types import NS_PER_S, BlockId, BlockKey, Decision, RequestRow, RequestState

LEVELS = ("full", "lean")
STEP_KINDS = ("prefill_step", "decode_step", "mixed_step")
"""Events that are intervals of computing, on which the busy times of the summary stand."""


class TableRecorder:
    """Implements `mcjax.types.Recorder` in memory (not thread-safe: called on the loop's thread only).

    `key_of` renders a dense block id as its key, for `events.first_block`; it is asked once for each id, at the end.
    `level="full"` keeps every row, which replay needs. `level="lean"` keeps what the summary is computed from:
    requests, step events, samples, and decisions without their candidates.
    Vectors handed over in a `Decision` are kept as they are: their owner must not write into them afterwards.
    """

    def __init__(self, key_of: Callable[[BlockId], BlockKey], level: str = "full"):
        if level not in LEVELS:
            raise ConfigError("track.level", level, "unknown level", LEVELS)
        self._key_of = key_of
        self._lean = level == "lean"
        self._requests = Rows(SCHEMAS["requests"])
        # Dense ids while the run goes on; keys are rendered at the end.
        self._events = Rows([(name, "int" if name == "first_block" else kind) for name, kind in SCHEMAS["events"]])
        self._decisions: list[Decision] = []
        self._reports = Rows(SCHEMAS["reports"])
        self._samples = Rows(SCHEMAS["samples"])
        self._outcomes = Rows(SCHEMAS["outcomes"])

    def event(
        self,
        time_ns: int,
        kind: str,
        request_id: int,
        place: str,
        *,
        tier: str = "",
        first_block: BlockId = -1,
        blocks: int = 0,
        tokens: int = 0,
        nbytes: int = 0,
        start_ns: int = -1,
        detail: str = "",
    ) -> None:
        if self._lean and kind not in STEP_KINDS:
            return
        row = (time_ns, start_ns, kind, request_id, place, tier, first_block, blocks, tokens, nbytes, detail)
        self._events.add(row)

    def decision(self, decision: Decision) -> Decision:
        self._decisions.append(decision)
        return decision

    def report(self, time_ns: int, tick_ns: int, source: str, kind: str, values: Sequence[int]) -> None:
        if not self._lean:
            # The sender may reuse its buffer.
            self._reports.add((time_ns, tick_ns, source, kind, np.array(values, dtype=np.int64)))

    def sample(self, time_ns: int, source: str, metric: str, value: float) -> None:
        self._samples.add((time_ns, source, metric, float(value)))

    def outcome(self, time_ns: int, mechanism: str, call: int, payload: dict[str, Any]) -> None:
        if not self._lean:
            text = json.dumps(payload, sort_keys=True, separators=(",", ":"), default=_plain)
            self._outcomes.add((time_ns, mechanism, call, text))

    def request(self, row: RequestRow) -> None:
        """Keep the row. Its token times are reduced to intervals and statistics, and dropped from it.

        Only a completed request gets latencies: what a rejected, cancelled or failed one saw is no latency.
        """
        request = row.request
        completed = row.state is RequestState.COMPLETED
        intervals = _intervals_ns(row.token_ends_ns) if completed else np.empty(0, np.int64)
        row.token_ends_ns = []
        ttft_ns = row.first_token_ns - request.arrival_ns if completed and row.first_token_ns >= 0 else None
        tbt = _interval_statistics(intervals)
        self._requests.add(
            (
                request.request_id,
                request.arrival_ns,
                request.tenant,
                request.session,
                request.turn,
                request.parent,
                request.priority,
                request.prompt_tokens,
                request.max_tokens,
                row.state.value,
                row.reason,
                row.prefill_instance,
                row.decode_instance,
                row.attempts,
                row.local_tokens,
                row.remote_tokens,
                row.prefill_start_ns,
                row.first_token_ns,
                row.finish_ns,
                row.output_tokens,
                ttft_ns,
                *tbt,
                row.slo_ttft_s,
                row.slo_tbt_s,
                completed and _within(ttft_ns, row.slo_ttft_s) and _within(tbt[-1], row.slo_tbt_s),
                row.blocks,
                row.output,
                intervals,
            )
        )

    def tables(self) -> dict[str, Table]:
        """Every table so far, by name, in the order of `SCHEMAS`. Recording may go on."""
        decisions = Rows(SCHEMAS["decisions"])
        for decided in self._decision_rows():
            decisions.add(decided)
        return {
            "requests": self._requests.table(),
            "events": self._events.table(first_block=self._first_block_keys()),
            "decisions": decisions.table(),
            "reports": self._reports.table(),
            "samples": self._samples.table(),
            "outcomes": self._outcomes.table(),
        }

    def _first_block_keys(self) -> Any:
        ids, index = np.unique(self._events.integers("first_block"), return_inverse=True)
        keys = ["" if block < 0 else self._key_of(int(block)).hex() for block in ids]
        return arrow().array(keys, arrow().string()).take(arrow().array(index))

    def _decision_rows(self) -> Iterator[tuple[Any, ...]]:
        for made in self._decisions:
            candidates = {} if self._lean else made.candidates
            others = {name: vector.tolist() for name, vector in candidates.items() if name not in QUANTITIES}
            yield (
                made.time_ns,
                made.request_id,
                made.stage,
                made.strategy,
                made.choice,
                made.source,
                made.reused_tokens,
                made.expected_s,
                () if self._lean else made.names,
                *(candidates.get(quantity) for quantity in QUANTITIES),
                json.dumps(others, sort_keys=True, separators=(",", ":")) if others else "",
                made.reason,
                made.outcome_s,
                made.outcome,
            )


def _intervals_ns(pieces: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """`[tokens - 1]` times between consecutive output tokens."""
    if not pieces:
        return np.empty(0, np.int64)
    return np.diff(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))


def _interval_statistics(intervals_ns: NDArray[np.int64]) -> tuple[int | None, int | None, int | None, int | None]:
    """Mean, p99, maximum and tail mean, each to the nearest nanosecond."""
    if len(intervals_ns) == 0:
        return None, None, None, None
    ordered = np.sort(intervals_ns)
    mean = ratio(int(ordered.sum()), len(ordered))
    return mean, ratio(percentile_parts(ordered, 99), 100), int(ordered[-1]), tail_mean_ns(ordered)


def _within(value_ns: int | None, bound_s: float) -> bool:
    """A request without token intervals cannot break their bound."""
    return value_ns is None or value_ns <= bound_s * NS_PER_S


def _plain(value: object) -> object:
    """What a real mechanism answers (arrays, bytes), as JSON can hold it."""
    if isinstance(value, np.ndarray):
        return cast("NDArray[Any]", value).tolist()
    if isinstance(value, np.generic):
        return cast("Any", value).item()
    if isinstance(value, bytes | bytearray):
        return value.hex()
    raise TypeError(f"an outcome cannot hold a {type(value).__name__}")
