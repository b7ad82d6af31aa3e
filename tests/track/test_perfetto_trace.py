"""A run as a trace: every row is there, where it belongs; requests can be followed; any story gives a sound file."""

from __future__ import annotations

import gzip
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from perfetto_reader import Slice, Trace, read
from track_fixtures import ARGUMENTS, key_of

import mcjax
from mcjax.errors import ConfigError, RunError
from mcjax.track.perfetto.write import write_trace
from mcjax.track.recorder import TableRecorder
from mcjax.track.run import Run
from mcjax.track.summary import summarise
from mcjax.types import Decision, Request, RequestRow, RequestState

SIM = [
    *("backend=sim", "workload=synthetic", "hardware=a800x8", "model=llama3-70b", "cluster=3p2d"),
    *("sched/prefill=kvcache_centric", "workload.sessions=25", "workload.rate_per_s=30", "track=none"),
]


@pytest.fixture(scope="module")
def run() -> Run:
    return mcjax.run(SIM, progress=False)


@pytest.fixture(scope="module")
def whole(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return read(write_trace(run, tmp_path_factory.mktemp("whole") / "whole.pftrace"))


def rows(run: Run, table: str) -> list[dict[str, Any]]:
    return run.table(table).to_pylist()


def test_each_row_of_the_log_is_on_the_track_of_its_place(run: Run, whole: Trace) -> None:
    events = rows(run, "events")
    roles = {event["place"]: event["detail"] for event in events if event["kind"] == "join"}
    assert sorted(roles) == ["d0", "d1", "p0", "p1", "p2"]
    for kind, track in (("prefill_step", "prefill chunks"), ("decode_step", "decode steps")):
        logged = [(e["place"], e["start_ns"], e["time_ns"]) for e in events if e["kind"] == kind]
        found = [(s.path[1].split()[0], s.start_ns, s.end_ns) for s in whole.of(kind)]
        assert Counter(found) == Counter(logged) != Counter()
        assert {s.path for s in whole.of(kind)} == {
            ("instances", f"{place} ({roles[place]})", track) for place, _, _ in logged
        }
    copies = [e for e in events if e["kind"] == "transfer"]
    assert Counter((s.start_ns, s.end_ns) for s in whole.of("transfer")) == Counter(
        (e["start_ns"], e["time_ns"]) for e in copies
    )
    ways = {s.path for s in whole.of("transfer")}
    assert ("links", "network", "node-p0 > node-d0") in ways
    assert ("links", "device", "node-p0 hbm>dram") in ways
    for kind in ("insert", "hit", "submit", "completed", "join"):
        logged = [(e["time_ns"], e["request_id"]) for e in events if e["kind"] == kind]
        assert Counter((s.start_ns, s.arguments.get("request_id", -1)) for s in whole.of(kind)) == Counter(logged)
        assert logged
    assert {s.path for s in whole.of("insert")} <= {("tiers", f"node-{name} dram", "blocks") for name in roles}
    kinds = {event["kind"] for event in events}
    assert kinds == {s.category for s in [*whole.slices, *whole.instants] if s.path[0] not in ("requests", "decisions")}


def test_arguments_are_those_of_the_row(run: Run, whole: Trace) -> None:
    cells = ("time_ns", "request_id", "first_block", "blocks", "place", "tier", "bytes", "detail")
    for kind in ("transfer", "release", "insert", "hit"):
        logged = Counter(tuple(event[cell] for cell in cells) for event in rows(run, "events") if event["kind"] == kind)
        none = {"first_block": "", "blocks": 0, "detail": ""}
        found = Counter(
            (made.end_ns, *((none | made.arguments)[cell] for cell in cells[1:])) for made in whole.of(kind)
        )
        assert found == logged != Counter()
        assert all(made.arguments["node"] == made.arguments["place"] for made in whole.of(kind))
    for made in whole.of("prefill_step"):
        assert made.arguments["node"] == f"node-{made.arguments['place']}"
        assert made.arguments["tokens"] > 0
    for made in whole.of("decode_step"):
        assert made.arguments["tokens"] % made.arguments["sequences"] == 0
        assert "blocks" not in made.arguments


def test_slices_of_a_lane_do_not_overlap(whole: Trace) -> None:
    assert {made.depth for made in whole.slices if made.path[0] == "requests"} == {0, 1}
    by_lane: dict[int, list[Slice]] = {}
    for made in whole.slices:
        if made.depth == 0:
            by_lane.setdefault(made.track, []).append(made)
        assert made.path[0] == "requests" or made.depth == 0
    for slices in by_lane.values():
        ordered = sorted(slices, key=lambda made: (made.start_ns, made.end_ns))
        assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(ordered))


def test_phases_lie_one_after_the_other_within_their_request(run: Run, whole: Trace) -> None:
    requests = {row["request_id"]: row for row in rows(run, "requests")}
    outer = {made.arguments["request_id"]: made for made in whole.of("request")}
    assert outer.keys() == requests.keys()
    for request_id, row in requests.items():
        made = outer[request_id]
        assert (made.start_ns, made.end_ns, made.path[1]) == (row["arrival_ns"], row["finish_ns"], row["tenant"])
        assert made.arguments["state"] == "completed"
    decoding = sum(row["finish_ns"] - row["first_token_ns"] for row in requests.values())
    assert sum(made.end_ns - made.start_ns for made in whole.of("request.decode")) == decoding > 0
    waiting = sum(row["prefill_start_ns"] - row["arrival_ns"] for row in requests.values())
    assert sum(made.end_ns - made.start_ns for made in whole.of("request.waiting")) == waiting > 0


def test_counters_show_the_samples(run: Run, whole: Trace) -> None:
    last: dict[tuple[str, str], float] = {}
    changes: Counter[tuple[str, int, float]] = Counter()
    for row in rows(run, "samples"):
        key = row["source"], row["metric"]
        if last.get(key) != row["value"]:
            last[key] = row["value"]
            changes[row["metric"], row["time_ns"], row["value"]] += 1
    found: Counter[tuple[str, int, float]] = Counter()
    for path, values in whole.values.items():
        metric = path[1] if path[:2] == ("links", "outgoing_bytes") else path[-1]
        found.update((metric, time_ns, value) for time_ns, value in values)
    assert found == changes != Counter()
    assert ("instances", "d0 (decode)", "batch") in whole.values
    assert ("tiers", "node-p0 dram", "pool_fill") in whole.values
    assert ("tiers", "node-d1 hbm", "page_fill") in whole.values


def test_decisions_tell_the_choice_and_its_estimates(run: Run, whole: Trace) -> None:
    logged = rows(run, "decisions")
    found = [made for made in whole.instants if made.path[0] == "decisions"]
    assert Counter((m.path[1], m.arguments["request_id"], m.arguments["choice"]) for m in found) == Counter(
        (row["stage"], row["request_id"], row["choice"]) for row in logged
    )
    for made in whole.of("decision.prefill"):
        told = made.arguments
        assert (told["candidates"], list(told["estimates"])) == (3, [told["choice"]])
        assert {"queue_s", "compute_s", "total_s"} <= told["estimates"][told["choice"]].keys()
        assert told["outcome"] == "completed"


def test_every_request_can_be_followed_across_nodes(run: Run, whole: Trace) -> None:
    edges = whole.edges()
    followed = 0
    for row in rows(run, "requests"):
        request_id = row["request_id"]
        mine = [
            made
            for made in [*whole.slices, *whole.instants]
            if made.flows and made.arguments["request_id"] == request_id
        ]
        theirs = [(a, b) for a, b in edges if a in mine or b in mine]
        assert all(a in mine and b in mine for a, b in theirs), "a flow never leads to another request"
        reached = [next(made for made in mine if made.category == "submit")]
        for made in reached:
            reached += [b for a, b in theirs if a is made and b not in reached]
        assert len(reached) == len(mine), "everything comes of the submission"
        assert all(a.start_ns <= b.start_ns for a, b in theirs)
        nodes = {made.arguments.get("node", "") for made in reached}
        assert len({node for node in nodes if node and ">" not in node}) >= 2
        (end,) = [made for made in mine if made.category == "completed"]
        before = [a for a, b in theirs if b is end]
        assert before[-1].path[-1] == ("decoding" if row["output_tokens"] > 1 else "sending")
        followed += 1
    assert followed == run.requests.num_rows > 50


def test_a_request_alone_has_its_own_rows_and_what_its_instances_shared(run: Run, tmp_path: Path) -> None:
    row = rows(run, "requests")[7]
    request_id = row["request_id"]
    alone = read(write_trace(run, tmp_path / "7.pftrace", [request_id]))
    named = {
        made.arguments["request_id"] for made in [*alone.slices, *alone.instants] if "request_id" in made.arguments
    }
    assert named == {request_id}
    assert [made.path for made in alone.of("request")] == [("requests", f"request {request_id}")]
    instances = {path[1].split()[0] for path in alone.tracks.values() if len(path) > 1 and path[0] == "instances"}
    assert {row["prefill_instance"], row["decode_instance"]} <= instances < {"p0", "p1", "p2", "d0", "d1"}
    assert {made.arguments["place"] for made in alone.of("decode_step")} == {row["decode_instance"]}
    for made in [*alone.slices, *alone.instants]:
        assert made.end_ns >= row["arrival_ns"]
    for kind in sorted({event["kind"] for event in rows(run, "events")}):
        mine = [e for e in rows(run, "events") if e["kind"] == kind and e["request_id"] == request_id]
        found = [made for made in alone.of(kind) if made.arguments.get("request_id") == request_id]
        assert len(found) == len(mine), "all of it, also what came after its last token"
    decision = alone.of("decision.prefill")[0].arguments
    assert len(decision["estimates"]) == decision["candidates"] == 3


def test_a_stretch_of_time_has_what_goes_on_in_it(run: Run, whole: Trace, tmp_path: Path) -> None:
    from_s, to_s = 0.2, 0.6
    part = read(write_trace(run, tmp_path / "part.pftrace", from_s=from_s, to_s=to_s))
    for kind in ("prefill_step", "decode_step", "transfer", "insert", "request"):
        inside = [m for m in whole.of(kind) if m.end_ns >= from_s * 1e9 and m.start_ns <= to_s * 1e9]
        assert 0 < len(part.of(kind)) == len(inside) < len(whole.of(kind))


def test_equal_runs_give_equal_files_and_packed_ones_the_same(run: Run, tmp_path: Path) -> None:
    plain = write_trace(run, tmp_path / "a.pftrace").read_bytes()
    packed = write_trace(run, tmp_path / "a.pftrace.gz").read_bytes()
    again = write_trace(mcjax.run(SIM, progress=False), tmp_path / "b.pftrace.gz").read_bytes()
    assert gzip.decompress(packed) == plain
    assert again == packed
    assert len(packed) < len(plain) / 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pftrace", "a.pftrace.gz", "b.pftrace.gz"]


def test_what_cannot_be_written_is_named_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no request 100000; the nearest are \d+, \d+, \d+, \d+"):
        write_trace(run, tmp_path / "none.pftrace", [3, 100000])
    with pytest.raises(ConfigError, match="--out"):
        write_trace(run, tmp_path / "no" / "folder.pftrace")
    with pytest.raises(ConfigError, match="lies before 5"):
        write_trace(run, tmp_path / "none.pftrace", from_s=5, to_s=4)
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_level_requests_still_shows_steps_and_requests(tmp_path: Path) -> None:
    kept = mcjax.run([*SIM, "track.level=requests", "workload.sessions=4"], progress=False)
    trace = read(write_trace(kept, tmp_path / "few.pftrace"))
    assert len(trace.of("request")) == kept.requests.num_rows
    assert len(trace.of("prefill_step")) > 0 < len(trace.of("decode_step"))
    assert trace.of("transfer") == []
    assert ("instances", "p0", "prefill chunks") in trace.tracks.values()


NODES = st.sampled_from(["node-p0", "node-d0", "node-x"])
TIMES = st.integers(0, 60)


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[str, dict[str, Any]]]:
    """Rows as no run would write them: any order, any overlap, requests that never came or end twice."""
    made: list[tuple[str, dict[str, Any]]] = []
    for _ in range(draw(st.integers(0, 30))):
        kind = draw(
            st.sampled_from(
                "prefill_step decode_step transfer transfer_failed release insert evict submit completed "
                "rejected join retry preempt compile strange request decision sample".split()
            )
        )
        start_ns, took_ns = draw(TIMES), draw(TIMES)
        who = draw(st.integers(0, 3))
        if kind in ("request", "decision", "sample"):
            made.append((kind, {"time_ns": start_ns, "took_ns": took_ns, "who": who}))
            continue
        event: dict[str, Any] = {"time_ns": start_ns + took_ns, "request_id": who, "place": draw(NODES), "blocks": who}
        if kind in ("prefill_step", "decode_step", "transfer", "transfer_failed", "release"):
            event["start_ns"] = start_ns
        if kind.startswith("transfer"):
            event |= {"place": f"{draw(NODES)}>{draw(NODES)}", "tier": "dram>hbm", "detail": "network"}
        elif kind in ("prefill_step", "decode_step", "join", "preempt", "compile"):
            event |= {"place": draw(st.sampled_from(["p0", "d0"]))}
            event["request_id"] = -1 if kind in ("decode_step", "join", "compile") else who
        elif kind in ("release", "insert", "evict"):
            event |= {"tier": "hbm" if kind == "release" else "dram", "first_block": 5}
        elif kind in ("submit", "completed", "rejected"):
            event["place"] = "frontend"
        made.append((kind, event))
    return made


def recorded(story: list[tuple[str, dict[str, Any]]]) -> Run:
    recorder = TableRecorder(key_of)
    for kind, values in story:
        if kind == "request":
            request = Request(values["who"], values["time_ns"], 100, 8)
            row = RequestRow(request, (1, 2), RequestState.COMPLETED, finish_ns=values["time_ns"] + values["took_ns"])
            row.prefill_start_ns, row.first_token_ns = values["took_ns"], values["time_ns"]
            recorder.request(row)
        elif kind == "decision":
            recorder.decision(
                Decision(
                    values["time_ns"],
                    values["who"],
                    "prefill",
                    "Mine",
                    "p0",
                    names=["p0"],
                    candidates={"queue_s": np.array([0.5])},
                )
            )
        elif kind == "sample":
            recorder.sample(values["time_ns"], "p0", "batch", values["who"])
        else:
            event = dict(values)
            recorder.event(event.pop("time_ns"), kind, event.pop("request_id"), event.pop("place"), **event)
    tables = recorder.tables()
    return Run(None, summarise(tables, **ARGUMENTS), {}, tables)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stories(), st.lists(st.integers(0, 3), max_size=2))
def test_any_story_gives_a_sound_file(
    tmp_path: Path, story: list[tuple[str, dict[str, Any]]], chosen: list[int]
) -> None:
    run = recorded(story)
    whole = read(write_trace(run, tmp_path / "story.pftrace"))
    told = Counter(made.category.split(".")[0] for made in [*whole.slices, *whole.instants] if made.depth == 0)
    assert told == Counter(kind for kind, _ in story if kind != "sample")
    for a, b in whole.edges():
        assert a.arguments["request_id"] == b.arguments["request_id"]
    known = {
        values.get("who", values.get("request_id")) for kind, values in story if kind not in ("decision", "sample")
    }
    if chosen and set(chosen) <= known:
        some = read(write_trace(run, tmp_path / "some.pftrace", chosen))
        named = {
            made.arguments["request_id"] for made in [*some.slices, *some.instants] if "request_id" in made.arguments
        }
        assert named <= set(chosen)
    elif chosen:
        with pytest.raises(RunError, match="no request"):
            write_trace(run, tmp_path / "some.pftrace", chosen)
