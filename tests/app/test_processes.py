"""Real runs whose instances are processes: tokens and blocks as of one process, whoever dies, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest_app import ROOT, Answer, runs

import mcjax as package

Command = Callable[..., Answer]
Play = Callable[..., dict[str, Any]]

PROGRAM = str(Path(__file__).with_name("processes_runs.py"))
PATIENCE_S = 280.0
pytestmark = pytest.mark.timeout(300)  # several processes that compile, on however busy a machine
FOUR = ("cluster=2p2d", "workload.sessions=6")


@pytest.fixture
def play(place: Path) -> Play:
    """`processes_runs.py` in a process of its own; what it told."""

    def call(*overrides: str, victim: str = "p0", harm: str = "SIGKILL", choice: int = 0) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, PROGRAM, victim, harm, str(choice), *overrides],
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return call


def check_whole(told: dict[str, Any]) -> None:
    """Every request has its tokens, they are the right ones, and nothing is left of the workers."""
    requests = told["requests"]
    assert told["state"] == "done"
    assert requests["completed"] == requests["submitted"] > 0
    assert told["verified"]["requests"] == requests["completed"]
    assert told["verified"]["tokens"] > 100
    assert told["verified"]["kv_blocks"] > 10
    assert told["replay"] == [True, []]
    check_gone(told)


def check_gone(told: dict[str, Any]) -> None:
    assert told["left"] == []
    if not told["jax"]:  # which the reference engine brings in, with descriptors of its own
        assert told["held"]["after"] == told["held"]["before"]


def test_a_run_over_processes(play: Play) -> None:
    told = play("workload.sessions=2", "workload.turns=2", "verify=false")
    assert told["state"] == "done"
    assert told["requests"]["completed"] == told["requests"]["submitted"] == 4
    assert told["deaths"] == []
    assert told["retries"] == told["late"] == 0
    assert not told["jax"], "the controller computes nothing"
    workers = told["processes"]["workers"]
    assert sorted(workers) == ["d0", "p0"]
    assert workers["p0"]["pid"] != workers["d0"]["pid"]
    assert told["bytes"]["shm"] == told["processes"]["bytes_between"] > 0
    assert sum(worker["bytes_read"] for worker in workers.values()) == told["bytes"]["shm"], "as the endpoints count"
    assert all(worker["order_overhead_s"] > 0 for worker in workers.values())
    assert told["replay"] == [True, []]
    check_gone(told)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["backend=sim", "workload=synthetic"], "launcher=processes: backend=sim computes nothing"),
        (["backend=check"], "backend=check"),
        (["kvpool.ssd_path=x", "kvpool.ssd_bytes=1e8"], "processes have no SSD tier"),
        (["launcher.transport=pigeon"], "launcher.transport=pigeon: must be one of shm, tcp, rdma, jax"),
        (["launcher.silence_s=0"], "launcher.silence_s=0: must be a number of seconds, more than 0"),
        (["+launcher.command={p0: 3}"], "launcher.command.p0=3: must be text"),
        (["+launcher.command={d9: nice}"], "launcher.command.d9=nice: there is no such instance; allowed: p0, d0"),
        (["+launcher.host={q: 127.0.0.1}", "cluster=1m"], "launcher.host.q=127.0.0.1: there is no such instance"),
        (["launcher.hosts={}"], "hosts"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused(mcjax: Command, overrides: list[str], problem: str) -> None:
    answer = mcjax("launcher=processes", *overrides)
    assert answer.status == 2
    assert problem in answer.err


@pytest.mark.check_long
@pytest.mark.parametrize("transport", ["shm", "tcp", "jax"])
def test_the_demo_over_processes_is_that_of_one_process(fresh: Command, place: Path, transport: str) -> None:
    answer = fresh("launcher=processes", f"launcher.transport={transport}", "workload.sessions=4", timeout_s=PATIENCE_S)
    assert answer.status == 0, answer.err
    assert "16 requests, 1,319 tokens, 117 KV blocks" in answer.out
    run = package.load(runs(place)[0])
    assert run.summary["bytes_by_transport"][transport] > 0
    replayed = fresh("replay", str(run.directory))
    assert replayed.status == 0, replayed.out


@pytest.mark.check_long
@pytest.mark.parametrize(
    "overrides",
    [
        ["backend.poison=true", "kvpool.hbm_cache=true", "cluster=2p1d"],
        ["launcher.transport=tcp", "cluster=1p2d", "backend.poison=true"],
        ["cluster=2m"],
        ["cluster=1m"],
        ["backend.mesh=2", "workload.sessions=2"],
        ["engine.headroom_tokens=8", "backend.pages=120"],
        ["cluster_changes=[{at_s: 0.1, join: decode}, {at_s: 0.3, drain: d0}]"],
        ["+launcher.command={p0: nice -n 1, d0: taskset -c 0}"],
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_every_shape_of_cluster_gives_the_same_tokens(play: Play, overrides: list[str]) -> None:
    told = play("workload.sessions=3", *overrides)
    check_whole(told)
    assert told["deaths"] == []
    assert told["late"] == 0


@pytest.mark.check_long
def test_rounded_blocks_cross_processes_as_they_rest(play: Play) -> None:
    told = play("workload.sessions=3", "kvpool.dram_encoding=int8", "workload.accepts_lossy=true")
    assert told["state"] == "done"
    assert told["requests"]["completed"] == told["requests"]["submitted"]
    assert told["bytes"]["shm"] < 0.3 * told["bytes"]["device"]
    assert told["replay"] == [True, []]


@pytest.mark.check_long
@pytest.mark.parametrize(
    ("transport", "victim", "choice"),
    [
        *[("shm", victim, choice) for victim in ("p0", "p1", "d0", "d1") for choice in (2, 9)],
        *[("tcp", "p0", 4), ("tcp", "p1", 16), ("tcp", "d0", 1), ("tcp", "d1", 20)],
    ],
)
def test_a_killed_worker_loses_no_request(play: Play, transport: str, victim: str, choice: int) -> None:
    told = play(*FOUR, f"launcher.transport={transport}", victim=victim, choice=choice)
    check_whole(told)
    assert told["deaths"] == [victim]
    worker = told["processes"]["workers"][victim]
    assert "ended by SIGKILL" in worker["death"]
    assert worker["bytes_read"] is None


@pytest.mark.check_long
@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_a_worker_that_stands_still_is_given_up(play: Play, victim: str) -> None:
    told = play(*FOUR, "launcher.silence_s=3", victim=victim, harm="SIGSTOP", choice=4)
    check_whole(told)
    assert told["deaths"] == [victim]
    assert "it said nothing for 3 s; ended by SIGKILL" in told["processes"]["workers"][victim]["death"]


@pytest.mark.check_long
@pytest.mark.parametrize("victim", ["p0", "d1"])
def test_another_takes_the_place_of_one_that_died(play: Play, victim: str) -> None:
    slowly = ("workload.sessions=14", "workload.rate_per_s=0.3")  # while it starts, requests come
    cluster = "2p1d" if victim == "p0" else "1p2d"
    told = play(f"cluster={cluster}", *slowly, "launcher.restart=true", victim=victim, choice=3)
    check_whole(told)
    assert told["deaths"] == [victim]
    assert told["processes"]["workers"][f"{victim}-2"]["order_overhead_s"] > 0, "it has computed"


@pytest.mark.check_long
def test_where_the_last_of_its_kind_dies_every_request_is_told(play: Play) -> None:
    told = play("workload.sessions=4", "verify=false", victim="d0", choice=3)
    requests = told["requests"]
    assert told["state"] == "done"
    assert requests["failed"] > 0
    assert requests["failed"] + requests["completed"] == requests["submitted"]
    assert told["deaths"] == ["d0"]
    assert told["replay"] == [True, []]
    check_gone(told)


@pytest.mark.check_long
def test_a_worker_that_cannot_start_is_named(fresh: Command) -> None:
    answer = fresh("launcher=processes", "+launcher.command={d0: 'false'}", timeout_s=PATIENCE_S)
    assert answer.status != 0
    assert "d0 cannot be: its process is gone" in answer.err
    assert "ended with status 1" in answer.err
    assert "Traceback" not in answer.err
    assert "never retrieved" not in answer.err


@pytest.mark.check_long
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_workers_end_with_the_run(place: Path, how: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "mcjax.cli", "launcher=processes", "workload.sessions=200", "cluster=1p2d"],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = ""
    while "ready 100%" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    children = list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))
    assert len(children) == 3
    time.sleep(1.0)
    process.send_signal(getattr(signal, how))
    said += process.communicate(timeout=PATIENCE_S)[0]
    end_s = time.monotonic() + 20
    while left := [pid for pid in children if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end_s, left
        time.sleep(0.05)
    if how == "SIGINT":
        assert process.returncode == 130, said
        run = package.load(runs(place)[0])
        assert (run.state, run.reason) == ("failed", "interrupted")
        assert run.events.num_rows > 0
