"""The summary against figures worked out by hand, and against its documentation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from track_fixtures import ARGUMENTS, MS, fabricate

from mcjax.track import tables as files
from mcjax.track.digest import digest
from mcjax.track.summary import finite, summarise

CONTRACT = """backend seed wall_s duration_s window_s requests ttft_s tbt_s tbt_tail_s slo_attainment goodput_rps
output_tokens_per_s prefix_hit_rate tokens_by_tier bytes_by_transport prefill_busy_s decode_busy_s peak_rss_bytes
estimate_error digest decode_during_prefill_share""".split()


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    return summarise(fabricate().tables(), **ARGUMENTS)


def test_the_contract_is_kept(summary: dict[str, Any]) -> None:
    assert set(CONTRACT) <= set(summary)
    assert {"submitted", "completed", "rejected", "failed", "cancelled"} <= set(summary["requests"])
    for name in ("ttft_s", "tbt_s", "tbt_tail_s"):
        assert set(summary[name]) == {"mean", "p50", "p90", "p99"}
    assert set(summary["prefix_hit_rate"]) == {"token", "block"}
    assert set(summary["tokens_by_tier"]) == {"hbm", "dram_local", "dram_remote", "ssd", "computed"}
    assert set(summary["estimate_error"]) == {"ttft_mape", "transfer_mape"}


def test_figures_by_hand(summary: dict[str, Any]) -> None:
    assert summary["requests"] == {
        "submitted": 4, "completed": 2, "rejected": 1, "failed": 0, "cancelled": 1, "before_window": 1,
    }  # fmt: skip
    assert summary["duration_s"] == 0.11
    assert summary["window_s"] == 0.1
    assert summary["ttft_s"] == {"mean": 0.0375, "p50": 0.0375, "p90": 0.0475, "p99": 0.04975}
    assert summary["tbt_s"]["p50"] == 0.003
    assert summary["tbt_s"]["mean"] == pytest.approx(14 / 3000)
    assert summary["tbt_tail_s"]["mean"] == 0.0065
    assert summary["slo_attainment"] == 0.25
    assert summary["goodput_rps"] == 10.0
    assert summary["output_tokens_per_s"] == 50.0
    assert summary["prefix_hit_rate"] == {"token": 48 / 200, "block": 3 / 14}
    assert summary["tokens_by_tier"] == {
        "hbm": 0, "dram_local": 32, "dram_remote": 16, "ssd": 0, "computed": 152,
    }  # fmt: skip
    assert summary["bytes_by_transport"] == {"sim": 96}
    # p0 10..40 and p1 30..50 in the window; some decode ran in 35..48.
    assert summary["prefill_busy_s"] == 0.05
    assert summary["decode_busy_s"] == 0.014
    assert summary["decode_during_prefill_share"] == (5 + 13) / 50
    assert summary["estimate_error"]["ttft_mape"] == pytest.approx(0.2)
    assert summary["estimate_error"]["transfer_mape"] == pytest.approx(0.5)
    assert summary["digest"] == digest(fabricate().tables())


def test_it_does_not_matter_where_the_tables_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read a few rows at a time; a step, a tick or a request must not care where a piece ends."""
    monkeypatch.setattr(files, "piece_rows", lambda name: 2)
    tables = fabricate().tables()
    files.write(tables, tmp_path)
    found, expected = (summarise(each, **ARGUMENTS) for each in (files.StoredTables(tmp_path), tables))
    assert {**found, "peak_rss_bytes": 0} == {**expected, "peak_rss_bytes": 0}


def test_overlapping_rows_of_one_instance_count_once() -> None:
    recorder = fabricate()
    recorder.event(48 * MS, "mixed_step", 9, "d1", start_ns=45 * MS)
    recorder.event(47 * MS, "decode_step", 9, "d1", start_ns=44 * MS)
    found = summarise(recorder.tables(), **ARGUMENTS)
    assert found["decode_busy_s"] == 0.014
    assert found["prefill_busy_s"] == 0.053
    assert found["decode_during_prefill_share"] == (5 + 13 + 3) / 53


def test_lost_requests_touch_no_latency(summary: dict[str, Any]) -> None:
    tables = fabricate().tables()
    keep = [state == "completed" for state in tables["requests"].column("state").to_pylist()]
    alone = summarise({**tables, "requests": tables["requests"].filter(keep)}, **ARGUMENTS)
    for name in ("ttft_s", "tbt_s", "tbt_tail_s", "goodput_rps"):
        assert alone[name] == summary[name]
    assert alone["slo_attainment"] == 0.5


def test_nothing_at_all_is_null() -> None:
    tables = {name: files.empty(name) for name in files.SCHEMAS}
    found = summarise(tables, **{**ARGUMENTS, "duration_ns": 0, "warmup_ns": 5})
    assert found["requests"]["submitted"] == 0
    assert found["ttft_s"]["p99"] is None
    assert found["goodput_rps"] is None
    assert found["decode_during_prefill_share"] is None
    assert found["prefix_hit_rate"] == {"token": None, "block": None}
    json.dumps(found, allow_nan=False)


def test_finite_has_no_word_for_nan() -> None:
    assert finite({"a": [float("nan"), 1.5, (float("inf"),)], "b": {"c": -float("inf")}}) == {
        "a": [None, 1.5, [None]], "b": {"c": None},
    }  # fmt: skip


def test_every_key_is_documented(summary: dict[str, Any]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    # Transports are named by the run, and the four statistics once for all spreads.
    open_ended = {**summary, "bytes_by_transport": {}}
    missing = [key for key in _keys(open_ended) if f"| `{key}` |" not in text]
    assert not missing, f"docs/metrics.md does not define {missing}"


def _keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value and "p50" not in value:
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key
