"""The recorder: what it reduces, what it keeps, in which order, at what cost."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from track_fixtures import MS, fabricate, key_of, row

from mcjax.errors import ConfigError
from mcjax.track.digest import digest
from mcjax.track.recorder import TableRecorder
from mcjax.track.schemas import DIGESTED, piece_rows
from mcjax.track.tables import StoredTables
from mcjax.types import Decision, Recorder, RequestState, Tier


def test_is_a_recorder_and_keeps_the_order_of_rows() -> None:
    recorder: Recorder = TableRecorder(key_of)
    count = 2 * piece_rows("events") + 3
    for index in range(count):
        recorder.event(index, "hit", -index, "n0", tier=Tier.DRAM, first_block=index % 3 - 1)
    assert isinstance(recorder, TableRecorder)
    events = recorder.tables()["events"].to_pydict()
    assert events["time_ns"] == list(range(count))
    assert events["request_id"][:3] == [0, -1, -2]
    assert events["tier"][0] == "dram"
    assert events["first_block"][:4] == ["", "00000000", "00000001", ""]


def test_recording_goes_on_after_tables_were_made() -> None:
    recorder = fabricate()
    before = recorder.tables()
    recorder.sample(9, "n0", "pool_fill", 1.0)
    assert recorder.tables()["samples"].num_rows == before["samples"].num_rows + 1


def test_a_request_is_reduced_to_its_latencies() -> None:
    recorder = fabricate()
    rows = recorder.tables()["requests"].to_pylist()
    second = rows[1]
    assert second["ttft_ns"] == 25 * MS
    assert second["intervals_ns"] == [MS, 3 * MS]
    assert (second["tbt_mean_ns"], second["tbt_max_ns"], second["tbt_tail_ns"]) == (2 * MS, 3 * MS, 3 * MS)
    assert second["tbt_p99_ns"] == MS + 2 * MS * 99 // 100
    assert second["output"] == [5, 6, 7]
    assert second["blocks"] == [1, 2]
    assert [made["met_slo"] for made in rows] == [True, True, False, False, False]


def test_only_completed_requests_have_latencies() -> None:
    for made in fabricate().tables()["requests"].to_pylist()[3:]:
        assert made["ttft_ns"] is None
        assert made["tbt_tail_ns"] is None
        assert made["intervals_ns"] == []
        assert made["output"] is None


def test_token_times_are_dropped_from_the_row() -> None:
    kept = row(1, 0, [1, 2], RequestState.COMPLETED)
    TableRecorder(key_of).request(kept)
    assert kept.token_ends_ns == []


def test_one_token_has_no_interval_and_breaks_no_bound() -> None:
    recorder = TableRecorder(key_of)
    recorder.request(row(1, 0, [5], RequestState.COMPLETED, slo_tbt_s=1e-12))
    made = recorder.tables()["requests"].to_pylist()[0]
    assert made["tbt_mean_ns"] is None
    assert made["met_slo"]


@given(st.lists(st.integers(0, 10**10), min_size=1, max_size=80))
def test_tail_is_the_mean_of_the_longest_tenth(intervals: list[int]) -> None:
    recorder = TableRecorder(key_of)
    ends = np.cumsum([3, *intervals]).tolist()
    recorder.request(row(1, 0, ends, RequestState.COMPLETED))
    made = recorder.tables()["requests"].to_pylist()[0]
    count = (len(intervals) + 9) // 10
    longest = sorted(intervals)[-count:]
    assert abs(made["tbt_tail_ns"] - sum(longest) / count) <= 0.5
    assert made["intervals_ns"] == intervals


def test_a_decision_stays_open_until_the_tables_are_made() -> None:
    made = fabricate().tables()["decisions"].to_pylist()
    assert made[0]["outcome_s"] == 0.025
    assert made[0]["outcome"] == "first token"
    assert made[0]["queue_s"] == [0.1, 0.2]
    assert made[0]["transfer_s"] is None
    assert json.loads(made[0]["others"]) == {"waits": [1.0, float("inf")]}
    assert made[0]["names"] == ["p0", "p1"]
    assert made[1]["others"] == ""


def test_reports_are_copied_when_they_are_made() -> None:
    recorder = TableRecorder(key_of)
    values = np.array([1, 2])
    recorder.report(1, 0, "p0", "load", values)  # type: ignore[arg-type]
    values[0] = 9
    assert recorder.tables()["reports"].to_pylist()[0]["values"] == [1, 2]


def test_outcomes_hold_what_mechanisms_answer() -> None:
    recorder = TableRecorder(key_of)
    recorder.outcome(1, "executor", 0, {"ends_ns": np.array([1, 2]), "sum": b"\x01", "n": np.int64(3)})
    assert json.loads(recorder.tables()["outcomes"].to_pylist()[0]["payload"]) == {
        "ends_ns": [1, 2],
        "sum": "01",
        "n": 3,
    }


def test_requests_keeps_what_the_summary_needs() -> None:
    tables = fabricate(TableRecorder(key_of, level="requests")).tables()
    assert set(tables["events"].column("kind").to_pylist()) == {"prefill_step", "decode_step"}
    assert tables["reports"].num_rows == 0
    assert tables["requests"].num_rows == 5
    assert tables["decisions"].to_pylist()[0]["queue_s"] is None
    assert tables["decisions"].to_pylist()[0]["outcome_s"] == 0.025
    with pytest.raises(ConfigError, match=r"track\.level=loud.*summary, requests, full"):
        TableRecorder(key_of, level="loud")


def test_rows_are_small_in_memory() -> None:
    """30,000 events stand for 300,000: under 150 MB at full size would be 15 MB here; they take less."""
    names = [f"p{index}" for index in range(16)]
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    recorder = TableRecorder(key_of)
    for index in range(30_000):
        recorder.event(10**12 + index, "decode_step", 10**6 + index, "d0", start_ns=10**12, tokens=2000, nbytes=10**9)
    for index in range(3_000):
        vectors = {name: np.zeros(16) for name in ("queue_s", "transfer_s", "prefill_s")}
        recorder.decision(Decision(index, index, "prefill", "Mine", "p0", names=names, candidates=vectors))
    for index in range(2_000):
        recorder.report(index, index, "p0", "load", list(range(8)))
    size = tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - before
    tracemalloc.stop()
    assert size < 15e6


def test_samples_come_one_by_one_or_many_at_once() -> None:
    recorder = TableRecorder(key_of)
    recorder.sample(1, "n0", "pool_fill", 0.5)
    recorder.samples(2, ["p0", "p1"], "batch", [3, 4.5])
    recorder.samples(2, [], "batch", [])
    assert [tuple(row.values()) for row in recorder.tables()["samples"].to_pylist()] == [
        (1, "n0", "pool_fill", 0.5), (2, "p0", "batch", 3.0), (2, "p1", "batch", 4.5),
    ]  # fmt: skip


def many(recorder: TableRecorder) -> None:
    """More rows than wait in any buffer; every second request is still running at the end."""
    rng = np.random.default_rng(0)
    fabricate(recorder)
    for index in range(100, 100 + 2 * piece_rows("requests")):
        made = recorder.decision(Decision(index, index, "prefill", "Mine", "p0", names=["p0"]))
        recorder.report(index, index, "p0", "load", rng.integers(0, 9, index % 4).tolist())
        for step in range(6):
            recorder.event(index + step, "decode_step", -1, f"d{step}", start_ns=index, first_block=index % 7 - 1)
        recorder.samples(index, ["d0", "d1"], "batch", rng.random(2).tolist())
        if index % 2:
            made.outcome_s = float(index)
            ends = np.cumsum(rng.integers(1, 99, 5)).tolist()
            recorder.request(row(index, 0, ends, RequestState.COMPLETED, output=[1] if index % 3 else None))


def test_rows_in_files_equal_rows_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcjax.track.table_file.ROW_GROUP_BYTES", 20_000)
    memory, stored, other = (TableRecorder(key_of) for _ in range(3))
    for recorder in (memory, stored):
        recorder.event(1, "early", 0, "before there was a directory")
    stored.write_to(tmp_path)
    for recorder in (memory, stored, other):
        many(recorder)
    parts = {path.name for path in tmp_path.iterdir()}
    assert "events.parquet.part" in parts
    assert not any(name.endswith(".parquet") for name in parts)
    found, expected = stored.tables(), memory.tables()
    assert digest(found) == digest(expected) == digest(StoredTables(tmp_path)) != digest(other.tables())
    assert stored.tables() is found
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{name}.parquet" for name in DIGESTED)
    assert pq.ParquetFile(tmp_path / "reports.parquet").num_row_groups > 1
    for name in expected:
        assert found[name].schema.equals(expected[name].schema)
        assert str(found[name].to_pylist()) == str(expected[name].to_pylist())  # text, since NaN differs from itself


def test_an_outcome_may_come_until_its_request_has_ended(tmp_path: Path) -> None:
    recorder = TableRecorder(key_of)
    recorder.write_to(tmp_path)
    slow = recorder.decision(Decision(0, 7, "prefill", "Mine", "p0"))
    for index in range(100, 100 + 3 * piece_rows("decisions")):
        recorder.decision(Decision(index, index, "prefill", "Mine", "p0"))
        recorder.request(row(index, 0, [1], RequestState.COMPLETED))
    slow.outcome_s = 3.0
    recorder.request(row(7, 0, [1], RequestState.COMPLETED))
    recorder.decision(Decision(1, 8, "prefill", "Mine", "p0", outcome="open to the end"))
    decisions = recorder.tables()["decisions"].to_pylist()
    assert [made["request_id"] for made in decisions[:2]] == [7, 100]
    assert decisions[0]["outcome_s"] == 3.0
    assert decisions[-1]["outcome"] == "open to the end"


def test_a_file_that_cannot_be_written_is_not_forgotten(tmp_path: Path) -> None:
    recorder = TableRecorder(key_of)
    recorder.write_to(tmp_path / "gone")
    for index in range(piece_rows("events") + 1):
        recorder.event(index, "hit", 0, "n0")
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            recorder.tables()
