"""`summary.json`: the figures of a run, computed from its tables alone. `docs/metrics.md` defines each of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mcjax.track.arrow import Table, arrow, compute
from mcjax.track.digest import digest
from mcjax.track.schemas import SCHEMA_VERSION
from mcjax.track.statistics import merge, overlap_ns, spread_of_pieces_s, spread_s
from mcjax.track.steps import COLUMNS as STEP_COLUMNS
from mcjax.track.steps import steps_of
from mcjax.track.tables import chosen, columns, floats, integers, pieces
from mcjax.types import NS_PER_S, Miss, RequestState

REQUEST_COLUMNS = [
    *"request_id arrival_ns state met_slo ttft_ns tbt_tail_ns prefill_start_ns prompt_tokens output_tokens".split(),
    *"hbm_tokens local_tokens remote_tokens ssd_tokens available_tokens routed_tokens skip_reason".split(),
    *(f"missed_{cause}_tokens" for cause in Miss),
]

HIT_COLUMNS = {
    "hbm": "hbm_tokens",
    "dram_local": "local_tokens",
    "dram_remote": "remote_tokens",
    "ssd": "ssd_tokens",
}
"""The column of each tier's hits; together they are what was delivered."""


def summarise(
    tables: Mapping[str, Table],
    *,
    backend: str,
    seed: int,
    wall_s: float,
    duration_ns: int,
    warmup_ns: int,
    block_tokens: int,
    bytes_by_transport: Mapping[str, int] | None = None,
    world: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The summary of a run that lasted `duration_ns` of run time and `wall_s` of real time.

    The window holds the requests that arrived at `warmup_ns` or later. What cannot be computed (no request, no
    window) is None. `bytes_by_transport` are the transports' own counters, of the whole run;
    without them the transfer events are summed (which only `track.level=full` keeps). `world` are figures that only the
    run's world knows.
    """
    every = columns(tables, "requests", REQUEST_COLUMNS)
    requests = every.filter(compute().greater_equal(every.column("arrival_ns"), warmup_ns))
    window_ns = max(duration_ns - warmup_ns, 0)
    submitted = requests.num_rows
    states = {state: int(chosen(requests, "state", [state.value]).sum()) for state in RequestState}
    met = int(requests.column("met_slo").to_numpy().sum())
    output_tokens = _output_tokens(requests)
    return {
        "schema": SCHEMA_VERSION,
        "backend": backend,
        "seed": seed,
        "wall_s": wall_s,
        "duration_s": duration_ns / NS_PER_S,
        "window_s": window_ns / NS_PER_S,
        "requests": {
            "submitted": submitted,
            "completed": states[RequestState.COMPLETED],
            "rejected": states[RequestState.REJECTED],
            "failed": states[RequestState.FAILED],
            "cancelled": states[RequestState.CANCELLED],
            "before_window": every.num_rows - submitted,
        },
        "ttft_s": spread_s(_present(requests, "ttft_ns")),
        "tbt_s": spread_of_pieces_s(lambda: _intervals(tables, warmup_ns)),
        "tbt_tail_s": spread_s(_present(requests, "tbt_tail_ns")),
        "slo_attainment": _share(met, submitted),
        "goodput_rps": _share(met * NS_PER_S, window_ns),
        "output_tokens_per_s": _share(output_tokens * NS_PER_S, window_ns),
        **_prefix(requests, block_tokens),
        "bytes_by_transport": _moved(tables) if bytes_by_transport is None else dict(bytes_by_transport),
        **_busy(tables, warmup_ns, duration_ns),
        "peak_rss_bytes": peak_rss_bytes(),
        "estimate_error": _estimate_error(tables, requests),
        **(world or {}),
        "digest": digest(tables),
    }


def peak_rss_bytes() -> int | None:
    """The most memory this process has held, or None where the platform does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def finite(value: Any) -> Any:
    """The same value, with None for every float that JSON has no word for."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in cast("list[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _present(table: Table, column: str) -> NDArray[np.int64]:
    return table.column(column).drop_null().to_numpy().astype(np.int64, copy=False)


def _intervals(tables: Mapping[str, Table], warmup_ns: int) -> Iterator[NDArray[np.int64]]:
    for piece in pieces(tables, "requests", ["arrival_ns", "intervals_ns"]):
        of_window = piece.filter(compute().greater_equal(piece.column("arrival_ns"), warmup_ns))
        yield compute().list_flatten(of_window.column("intervals_ns")).to_numpy()


def _output_tokens(requests: Table) -> int:
    completed = chosen(requests, "state", [RequestState.COMPLETED.value])
    return int(integers(requests, "output_tokens")[completed].sum())


def _prefix(requests: Table, block_tokens: int) -> dict[str, Any]:
    """Where prompt tokens came from, over requests whose prefill started, each once (its first attempt)."""
    started = integers(requests, "prefill_start_ns") >= 0
    found = requests.filter(arrow().array(started))
    prompt = integers(found, "prompt_tokens")
    tiers = {tier: integers(found, column) for tier, column in HIT_COLUMNS.items()}
    hit = delivered(found)
    # The last token of a wholly cached prompt is computed anyway: its block still counts as hit, hence the rounding up.
    hit_blocks, blocks = -(-hit // block_tokens), -(-prompt // block_tokens)
    return {
        "prefix_hit_rate": {
            "token": _share(int(hit.sum()), int(prompt.sum())),
            "block": _share(int(hit_blocks.sum()), int(blocks.sum())),
        },
        "tokens_by_tier": {
            **{tier: int(tokens.sum()) for tier, tokens in tiers.items()},
            "computed": int((prompt - hit).sum()),
        },
        "hit_tokens": {
            "available": _known_sum(found, "available_tokens"),
            "routed": _known_sum(found, "routed_tokens"),
            "delivered": int(hit.sum()),
        },
        "missed_tokens": {cause.value: _known_sum(found, f"missed_{cause}_tokens") for cause in Miss},
        "skipped_tokens": _skipped(found),
    }


def delivered(requests: Table) -> NDArray[np.int64]:
    """`[rows]` prompt tokens that were not computed."""
    return np.array([integers(requests, column) for column in HIT_COLUMNS.values()], np.int64).sum(axis=0)


def _known_sum(requests: Table, column: str) -> int | None:
    """None where a request does not tell: it is of an earlier version."""
    values = requests.column(column)
    return None if values.null_count else int(compute().sum(values).as_py() or 0)


def _skipped(requests: Table) -> dict[str, int]:
    """Tokens that were skipped, by the first reason of each request."""
    reasons = requests.column("skip_reason")
    names = sorted(reason for reason in compute().unique(reasons).to_pylist() if reason)
    tokens = requests.column(f"missed_{Miss.SKIPPED}_tokens").fill_null(0).to_numpy()
    return {name: int(tokens[chosen(requests, "skip_reason", [name])].sum()) for name in names}


def _moved(tables: Mapping[str, Table]) -> dict[str, int]:
    events = columns(tables, "events", ["kind", "detail", "bytes"])
    transfers = events.filter(arrow().array(chosen(events, "kind", ["transfer"])))
    moved: dict[str, int] = {}
    for detail in sorted(compute().unique(transfers.column("detail")).to_pylist()):
        transport = detail.split(":")[0]  # a path's name goes on with its NICs
        nbytes = int(integers(transfers, "bytes")[chosen(transfers, "detail", [detail])].sum())
        moved[transport] = moved.get(transport, 0) + nbytes
    return moved


def _busy(tables: Mapping[str, Table], window_start_ns: int, window_end_ns: int) -> dict[str, Any]:
    """Busy seconds inside the window, summed over instances; a mixed step is busy on both sides."""
    steps = steps_of(pieces(tables, "events", STEP_COLUMNS))
    prefill, decode = (
        (np.clip(busy.starts_ns, window_start_ns, window_end_ns), np.clip(busy.ends_ns, window_start_ns, window_end_ns))
        for busy in (steps.prefill, steps.decode)
    )
    prefill_ns, decode_ns = (int((ends - starts).sum()) for starts, ends in (prefill, decode))
    shared_ns = int(overlap_ns(*prefill, merge(*decode)).sum())
    return {
        "prefill_busy_s": prefill_ns / NS_PER_S,
        "decode_busy_s": decode_ns / NS_PER_S,
        "decode_during_prefill_share": _share(shared_ns, prefill_ns),
    }


def _estimate_error(tables: Mapping[str, Table], requests: Table) -> dict[str, float | None]:
    decisions = columns(tables, "decisions", ["request_id", "stage", "expected_s", "outcome_s"])
    counted = np.isin(integers(decisions, "request_id"), integers(requests, "request_id"))
    expected, outcome = floats(decisions, "expected_s"), floats(decisions, "outcome_s")
    counted &= np.isfinite(expected) & np.isfinite(outcome) & (outcome > 0)

    def mape(stage: str) -> float | None:
        rows = counted & chosen(decisions, "stage", [stage])
        errors = np.abs(expected[rows] - outcome[rows]) / outcome[rows]
        return math.fsum(errors.tolist()) / len(errors) if len(errors) else None

    return {"ttft_mape": mape("prefill"), "transfer_mape": mape("transfer")}
