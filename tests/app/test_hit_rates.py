"""`backend=hits`: what it keeps is what the pool says, its mistakes are told by key, and it is run once."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest_app import Answer, runs

import mcjax
from mcjax.app import ls, plot, report
from mcjax.app.hit_rates.replay import chains_of, replay
from mcjax.cost.catalogue import fitted
from mcjax.errors import ConfigError, RunError
from mcjax.kvpool.eviction.cost_aware import CostAware
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.watermark.static import Static
from mcjax.track.run import Run
from mcjax.workload.mooncake import Mooncake

Command = Callable[..., Answer]
TRACE = "+workload@backend.traces.mine=mooncake"
COST = ("hardware=a800x8", "model=llama3-70b")
CHAINS = ([0, 1, 2], [0, 1, 3], [4, 5], [0, 1, 2], [6], [4, 5], [0, 1, 3], [7, 8, 9, 10], [0, 1, 2], [6])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {"timestamp": 10 * at, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for at, ids in enumerate(CHAINS)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def words(trace: Path, *more: str) -> list[str]:
    where = f"track.sinks.0.directory={trace.parent / 'runs'}"
    sizes = "backend.capacities_tokens=[2048,3072,100000]"
    own = ["backend=hits", "backend.processes=1", TRACE, f"backend.traces.mine.path={trace}", where, sizes]
    return [*own, *COST, *more]


def rates(run: Run, policy: str, column: str = "hit_rate") -> list[float]:
    return [row[column] for row in run.summary["hits"]["rows"] if row["policy"] == policy]


def test_rows_are_what_the_pool_says(trace: Path) -> None:
    run = mcjax.run(words(trace), progress=False)
    chains = chains_of(Mooncake(str(trace)).rows, 512, 512)
    assert {row["policy"] for row in run.summary["hits"]["rows"]} == {
        *("lru", "lfu", "fifo", "s3fifo", "sieve", "length_aware", "cost_aware", "belady")
    }
    cost_aware = CostAware()
    cost_aware.use_cost(fitted(), 512)
    for name, strategy in (("lru", LRU()), ("cost_aware", cost_aware)):
        found = replay(chains, 6, strategy, Static())
        assert rates(run, name)[1] == chains.hit_rate(found)
        assert rates(run, name, "block_hit_rate")[1] == sum(found) / sum(map(len, CHAINS))
    endless = {row["hit_rate"] for row in run.summary["hits"]["rows"] if row["capacity_tokens"] == 100_000}
    assert len(endless) == 1, "pools that never evict are alike"
    assert rates(run, "belady") >= rates(run, "lru")


def test_smaller_blocks_and_a_watermark(trace: Path) -> None:
    whole = mcjax.run(words(trace, "backend.policies=[lru]"), progress=False)
    cut = mcjax.run(words(trace, "backend.policies=[lru]", "kvpool.block_tokens=256"), progress=False)
    early = mcjax.run(words(trace, "backend.policies=[lru]", "kvpool.watermark.low=0.5"), progress=False)
    assert [row["capacity_blocks"] for row in cut.summary["hits"]["rows"]] == [8, 12, 390]
    assert rates(cut, "lru")[-1] == rates(whole, "lru")[-1]
    assert sum(rates(early, "lru")) < sum(rates(whole, "lru"))


class NewestFirst:
    """Keeps what came first."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def on_insert(self, blocks: Any, parent: Any) -> None:
        self.blocks += blocks

    def on_hit(self, blocks: Any) -> None:
        pass

    def on_remove(self, blocks: Any) -> None:
        for block in blocks:
            self.blocks.remove(block)

    def victims(self) -> Any:
        return reversed(self.blocks)


def test_a_strategy_from_python_is_one_more_policy(trace: Path) -> None:
    run = mcjax.run(words(trace, "backend.policies=[lru,belady]"), progress=False, eviction=NewestFirst)
    chains = chains_of(Mooncake(str(trace)).rows, 512, 512)
    assert rates(run, "NewestFirst")[0] == chains.hit_rate(replay(chains, 4, NewestFirst(), Static()))


def test_a_run_has_its_table_its_picture_and_its_key(
    mcjax: Command, place: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = mcjax(*words(trace, f"track.sinks.0.directory={place / 'runs'}"))
    assert answer.status == 0, answer.err
    assert "length_aware" in answer.out
    assert "mine, %" in answer.out
    (directory,) = runs(place)
    with (directory / "hit_rates.csv").open() as file:
        assert {row["policy"] for row in csv.DictReader(file)} >= {"lru", "belady"}
    assert (directory / "overview.png").stat().st_size > 10_000
    again = mcjax(*words(trace, f"track.sinks.0.directory={place / 'runs'}"))
    assert "cached" in again.out
    assert runs(place) == [directory]
    assert plot.command([str(directory), "kind=hit_rate", f"out={place / 'hits.png'}"]) == 0
    with (place / "hits.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 8 * 3
    monkeypatch.chdir(place)
    assert ls.command([]) == 0
    assert report.command([str(directory), "--out", str(place / "report.html")]) == 0


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("backend.policies=[lru,seive]", "backend.policies=seive: no such policy, did you mean sieve"),
        ("backend.policies=[]", "backend.policies=[]: name at least one"),
        ("backend.capacities_tokens=[100]", "backend.capacities_tokens=100: a pool holds at least a block of 512"),
        ("kvpool.block_tokens=300", "kvpool.block_tokens=300: must divide the 512 tokens"),
        ("cluster=8p8d", "cluster=8p8d: backend=hits has no use for it"),
        ("sched/prefill=random", "sched.prefill=mcjax.sched.prefill.random.Random: backend=hits has no use for it"),
        ("~backend.traces.mine", "backend.traces={}: name at least one"),
    ],
)
def test_mistakes_are_told_by_key(trace: Path, word: str, told: str) -> None:
    given = words(trace)
    if word.startswith("~"):
        given = [each for each in given if "traces" not in each]
    with pytest.raises(ConfigError) as problem:
        mcjax.run([*given, *([] if word.startswith("~") else [word])], progress=False)
    assert told in str(problem.value)


def test_a_strategy_that_ends_its_process_is_told(trace: Path) -> None:
    class Ends(NewestFirst):
        def victims(self) -> Any:
            import os

            os._exit(3)

    with pytest.raises(RunError, match="ended by itself"):
        mcjax.run(words(trace, "backend.policies=[lru]"), progress=False, eviction=Ends)
