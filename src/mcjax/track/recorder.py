"""The recorder that keeps everything: rows go into columns, and come out as Arrow tables or Parquet files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mcjax.track.arrow import Table, arrow
from mcjax.track.columns import Gauges, Rows, table_of
from mcjax.track.digest import combined
from mcjax.track.levels import FULL, REQUESTS, check_level
from mcjax.track.reduction import reduced
from mcjax.track.schemas import DIGESTED, QUANTITIES, SCHEMAS, piece_rows
from mcjax.track.statistics import percentile_parts, ratio, tail_mean_ns
from mcjax.track.steps import STEP_KINDS
from mcjax.track.table_file import TableFile
from mcjax.track.tables import StoredTables, empty
from mcjax.types import NS_PER_S, BlockId, BlockKey, Decision, Miss, RequestRow, RequestState


class TableRecorder:
    """Implements `mcjax.types.Recorder` (not thread-safe: called on the loop's thread only).

    Rows are kept in memory, or, after `write_to`, in files that grow as they come. `key_of` renders a dense block id as
    its key, for `events.first_block`. `level="full"` takes every row, which replay needs. The others take what the
    summary is computed from: requests, step events, samples, and decisions without their candidates; at `summary` the
    tables go once it is made (`tracker.Tracker.finish`).
    Vectors and lists handed over in a `Decision`, or as the sources and values of samples, are kept as they are: their
    owner must not write into them afterwards.
    """

    def __init__(self, key_of: Callable[[BlockId], BlockKey], level: str = FULL):
        self._level = check_level(level)
        self._key_of = key_of
        self._whole = level == FULL
        self._budget_bytes: float | None = None
        self._cut = ""
        self._pieces: dict[str, list[Table]] = {name: [] for name in SCHEMAS}
        self._files: dict[str, TableFile] | None = None
        self._stored: StoredTables | None = None
        self._directory = Path()
        self._requests = self._rows("requests")
        self._events = self._rows("events", first_block=self._first_block_keys)
        self._event_cells = self._events.cells
        self._reports = self._rows("reports")
        self._outcomes = self._rows("outcomes")
        self._samples = Gauges(partial(self._take, "samples"))
        self._decisions: list[Decision] = []
        self._decisions_due = piece_rows("decisions")
        self._undecided: set[int] = set()
        """Requests that have decisions and have not ended: only in these may an outcome still be set."""

    def _rows(self, name: str, **rendered: Callable[[list[Any]], Any]) -> Rows:
        return Rows(name, partial(self._take, name), rendered)

    def write_to(self, directory: Path, budget_bytes: float | None = None) -> None:
        """Keep rows in files of `directory`, those so far too. Once `tables` was called, recording is over then.

        Once the files of a `full` run have come to more than `budget_bytes`, only what `requests` keeps is written on;
        the digest still covers every row.
        """
        self._directory = directory
        self._budget_bytes = budget_bytes if self._whole else None
        self._files = {name: TableFile(name, directory) for name in SCHEMAS}
        for name, pieces in self._pieces.items():
            for piece in pieces:
                self._take(name, piece)
            pieces.clear()

    def kept(self) -> dict[str, str]:
        """`level`, as it came to be, for the summary; and `cut`: why it is not the one that was asked for."""
        return {"level": REQUESTS, "cut": self._cut} if self._cut else {"level": self._level}

    def _take(self, name: str, piece: Table) -> None:
        if self._files is None:
            self._pieces[name].append(piece)
            return
        self._files[name].take(piece, reduced(name, piece) if self._cut else piece)
        if self._budget_bytes is not None and not self._cut:
            nbytes = sum(file.nbytes for file in self._files.values())
            if nbytes > self._budget_bytes:
                self._cut = f"its tables came to more than track.budget_bytes={self._budget_bytes:.0f}"

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
        if not self._whole and kind not in STEP_KINDS:
            return
        cells = self._event_cells
        cells += (time_ns, start_ns, kind, request_id, place, tier, first_block, blocks, tokens, nbytes, detail)
        if len(cells) >= self._events.full:
            self._events.flush()

    def decision(self, decision: Decision) -> Decision:
        self._decisions.append(decision)
        self._undecided.add(decision.request_id)
        if len(self._decisions) >= self._decisions_due:
            self._move_decided()
        return decision

    def report(
        self, time_ns: int, tick_ns: int, source: str, kind: str, values: Sequence[int] | NDArray[np.int64]
    ) -> None:
        if self._whole:
            # The sender may reuse its buffer.
            kept = values.copy() if isinstance(values, np.ndarray) else tuple(values)
            self._reports.add((time_ns, tick_ns, source, kind, kept))

    def sample(self, time_ns: int, source: str, metric: str, value: float) -> None:
        self._samples.add(time_ns, (source,), metric, (value,))

    def samples(self, time_ns: int, sources: Sequence[str], metric: str, values: Sequence[float]) -> None:
        self._samples.add(time_ns, sources, metric, values)

    def outcome(self, time_ns: int, mechanism: str, call: int, payload: dict[str, Any]) -> None:
        if self._whole:
            text = _JSON.encode(payload)
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
        self._undecided.discard(request.request_id)
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
                row.hbm_tokens,
                row.local_tokens,
                row.remote_tokens,
                row.ssd_tokens,
                row.available_tokens,
                row.routed_tokens,
                *_missed(row.missed_tokens),
                row.skip_reason,
                row.prefill_start_ns,
                row.first_token_ns,
                row.finish_ns,
                row.output_tokens,
                row.finish_reason,
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

    def tables(self) -> Mapping[str, Table]:
        """Every table so far, by name, in the order of `SCHEMAS`.

        Of tables in memory, recording may go on; files are closed.
        """
        for rows in (self._requests, self._events, self._reports, self._outcomes, self._samples):
            rows.flush()
        if self._files is None:
            self._move_decided()
            pieces = {**self._pieces, "decisions": [*self._pieces["decisions"], self._decision_table(self._decisions)]}
            return {name: arrow().concat_tables([empty(name), *of_table]) for name, of_table in pieces.items()}
        if self._stored is None:
            self._undecided.clear()
            self._move_decided()
            for file in self._files.values():
                file.finish()
            self._stored = StoredTables(self._directory, combined(self._files[name].digest for name in DIGESTED))
        return self._stored

    def _first_block_keys(self, blocks: list[int]) -> Any:
        ids, index = np.unique(np.array(blocks, np.int64), return_inverse=True)
        keys = ["" if block < 0 else self._key_of(block).hex() for block in ids.tolist()]
        return arrow().array(keys, arrow().string()).take(arrow().array(index))

    def _move_decided(self) -> None:
        """Hand over the decisions before the first whose request goes on."""
        waiting = self._decisions
        decided = next((at for at, made in enumerate(waiting) if made.request_id in self._undecided), len(waiting))
        if decided:
            self._take("decisions", self._decision_table(waiting[:decided]))
            del waiting[:decided]
        self._decisions_due = len(waiting) + piece_rows("decisions")

    def _decision_table(self, decisions: Sequence[Decision]) -> Table:
        rows = [self._decision_row(made) for made in decisions]
        return table_of("decisions", list(zip(*rows, strict=True))) if rows else empty("decisions")

    def _decision_row(self, made: Decision) -> tuple[Any, ...]:
        candidates = made.candidates if self._whole else {}
        others = {name: vector.tolist() for name, vector in candidates.items() if name not in QUANTITIES}
        return (
            made.time_ns,
            made.request_id,
            made.stage,
            made.strategy,
            made.choice,
            made.source,
            made.reused_tokens,
            made.expected_s,
            made.names if self._whole else (),
            *(candidates.get(quantity) for quantity in QUANTITIES),
            _JSON.encode(others) if others else "",
            made.reason,
            made.outcome_s,
            made.outcome,
        )


def _missed(missed: Mapping[Miss, int] | None) -> Sequence[int | None]:
    """Tokens of every cause; nothing is known of a request that nobody has looked anything up for."""
    if not missed:
        return _NO_MISSES if missed is None else _NONE_MISSED
    return [missed.get(cause, 0) for cause in Miss]


_NO_MISSES = (None,) * len(Miss)
_NONE_MISSED = (0,) * len(Miss)


def _intervals_ns(pieces: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """`[tokens - 1]` times between consecutive output tokens."""
    if not pieces:
        return np.empty(0, np.int64)
    ends_ns = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return ends_ns[1:] - ends_ns[:-1]


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


_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=_plain)
