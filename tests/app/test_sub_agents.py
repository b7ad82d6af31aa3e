"""Sessions that start others, in every world: an agent's next turn waits for its sub-agents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest_app import Answer

import mcjax
from mcjax.backends.check import schedule
from mcjax.backends.check.faults import Faults
from mcjax.backends.check.schedule import Parts, run_schedule
from mcjax.engine.cluster import Policies
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.watermark.static import Static as StaticWatermark
from mcjax.sched.admission.none import AdmitAll
from mcjax.sched.batching.chunked import Chunked
from mcjax.sched.decode.least_loaded import LeastLoaded
from mcjax.sched.fetch.cheapest import Cheapest
from mcjax.sched.placement import Strategies
from mcjax.sched.prefill.kvcache_centric import KVCacheCentric
from mcjax.sched.roles.static import Static
from mcjax.sched.tenancy.fifo import FIFO
from mcjax.track.run import Run
from mcjax.types import NS_PER_S, NullRecorder, Tokens
from mcjax.workload.base import Session, Turn
from mcjax.workload.synthetic import Synthetic


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are kept in an empty directory."""
    monkeypatch.chdir(tmp_path)


class Parent:
    """`first`, whose first turn starts all of `others` at once."""

    def __init__(self, first: Session, others: list[Session]):
        self.start_ns = first.start_ns
        self._first, self._others = first, others

    def next_turn(self, answer: Tokens | None) -> Turn | None:
        turn, others, self._others = self._first.next_turn(answer), self._others, []
        return turn if turn is None else replace(turn, children=tuple(others))


Command = Callable[..., Answer]

REAL = """
import sys
sys.path.insert(0, {folder!r})
from test_sub_agents import Family, Synthetic, check_order, mcjax

workload = Family(Synthetic(2, sessions=4, turns=2, rate_per_s=50, think_time_s=0.01))
check_order(mcjax.run(["track.sinks.0.overview=false"], workload=workload, progress=False))
"""


class Family:
    """The sessions of `of` as one agent and its sub-agents, which start as long after its first turn as they did."""

    name = "family"

    def __init__(self, of: Synthetic):
        self.block_tokens = of.block_tokens
        self._of = of

    def sessions(self) -> Iterator[Session]:
        first, *others = self._of.sessions()
        yield Parent(first, [*others])

    def inputs(self) -> dict[str, str]:
        return {}


def check_order(run: Run) -> None:
    """The agent's first turn before all else; its second after every sub-agent's last."""
    rows = run.requests.select(["request_id", "arrival_ns", "finish_ns", "state"]).to_pylist()
    assert {row["state"] for row in rows} == {"completed"}
    at = {row["request_id"]: row for row in rows}
    others = [row for row in rows if row["request_id"] >= 1000]
    assert len(others) > 2
    assert all(row["arrival_ns"] >= at[0]["finish_ns"] for row in others)
    assert at[1]["arrival_ns"] >= max(row["finish_ns"] for row in others)


def test_in_simulation() -> None:
    workload = Family(Synthetic(2, sessions=4, turns=2, rate_per_s=50))
    words = ["backend=sim", "hardware=a800x8", "model=llama3-70b", "cluster=2p2d", "track.sinks.0.overview=false"]
    check_order(mcjax.run(words, workload=workload, progress=False))


@pytest.mark.check_long
def test_on_the_real_engine(fresh: Command) -> None:
    """In a process of its own: how many devices jax has is settled at its first use."""
    answer = fresh(code=REAL.format(folder=str(Path(__file__).parent)))
    assert answer.status == 0, answer.err


@pytest.mark.parametrize("seed", range(12))
def test_under_faults(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is lost, late, corrupted or cancelled: every token right, nothing hangs, nothing is left held."""
    drawn = schedule.draw_workload
    monkeypatch.setattr(schedule, "draw_workload", lambda rng: Family(drawn(rng)))
    faults = Faults(lost=0.03, late=0.03, duplicated=0.05, corrupted=0.04, slow=0.03, cancelled=0.1, deaths=1.0)
    parts = Parts(
        lambda: Strategies(KVCacheCentric(1.0), LeastLoaded(), Cheapest(), AdmitAll(), Static()),
        Policies(LRU, StaticWatermark, lambda: Chunked(6), FIFO),
        lambda table: NullRecorder(),
    )
    outcome = run_schedule(seed, faults, parts)
    assert outcome.problems == []
    assert outcome.requests > 0


def test_a_weka_trace_through_the_command_line(tmp_path: Path) -> None:
    def call(t: float, blocks: int) -> dict[str, object]:
        ids = list(range(blocks))
        return {"t": t, "type": "n", "model": "m", "in": 64 * blocks, "out": 20, "hash_ids": ids, "api_time": 1}

    agents = [{"t": 2, "type": "subagent", "agent_id": f"a{i}", "requests": [call(2, 30), call(4, 40)]} for i in "01"]
    entry = {"id": "c", "block_size": 64, "requests": [call(0, 300), *agents, call(9, 310), call(11, 320)]}
    path = tmp_path / "weka.jsonl"
    path.write_text(json.dumps(entry) + "\n")
    words = ["backend=sim", "workload=weka", f"workload.path={path}", "hardware=a800x8", "model=llama3-70b"]
    run = mcjax.run([*words, "cluster=1p1d", "track.sinks.0.overview=false"], progress=False)
    rows = sorted(run.requests.to_pylist(), key=lambda row: row["request_id"])
    assert [row["session"] for row in rows] == ["c", "c/a0", "c/a0", "c/a1", "c/a1", "c", "c"]
    assert rows[5]["arrival_ns"] >= max(row["finish_ns"] for row in rows[1:5]) + 4 * NS_PER_S
    assert rows[1]["arrival_ns"] == rows[3]["arrival_ns"]
    assert rows[5]["local_tokens"] == 300 * 64
