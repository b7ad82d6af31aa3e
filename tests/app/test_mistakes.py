"""What a person gets to read, and the exit status, for each kind of mistake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from conftest_app import SMALL, Answer, runs

from mcjax.app.mistakes import check_arguments, described, fits, locate, own_traceback
from mcjax.errors import ConfigError

Command = Callable[..., Answer]

MISTAKES = [
    (["sched/prefill=cache_awar"], ["Could not find 'sched/prefill/cache_awar'", "cache_aware", "kvcache_centric"]),
    (["launcher=slurm"], ["Could not find 'launcher/slurm'", "embedded"]),
    (["experiment=nope"], ["Could not find 'experiment/nope'", "mooncake_8p8d"]),
    (["sched.report_perod_s=1"], ["Could not override 'sched.report_perod_s'", "did you mean report_period_s?"]),
    (["bakend=sim"], ["Could not override 'bakend'", "did you mean backend?"]),
    (["cluster=}"], ["Error parsing override 'cluster=}'"]),
    (["sched.report_period_s=abc"], ["sched.report_period_s=abc", "seconds"]),
    (["sched.attempts=1.5"], ["sched.attempts=1.5", "whole number"]),
    (["sched.attempts=null"], ["sched.attempts=null", "needs a value"]),
    (["seed=-1"], ["seed=-1", "0 or more"]),
    (["engine.max_steps=0"], ["engine.max_steps=0", "1 or more, or null"]),
    (["verify=maybe"], ["verify=maybe", "true or false, or null"]),
    (["backend.chunk_tokens=0"], ["backend.chunk_tokens=0", "1 or more"]),
    (["backend.memory_share=1.5"], ["backend.memory_share=1.5", "at most 1"]),
    (["workload.sessions=many"], ["workload.sessions=many", "a whole number"]),
    (["workload.tenants=3"], ["workload.tenants=3", "a mapping"]),
    (["track.warmup_s=soon"], ["track.warmup_s=soon", "a number"]),
    (["track.sinks.0.directory=7"], ["track.sinks[0].directory=7", "text"]),
    (["cluster=7x"], ["cluster=7x", "8p8d", "16m"]),
    (["cluster=8p"], ["cluster=8p", "needs prefill and decode instances"]),
    (["cluster={prefil: 2}"], ["cluster.prefil=2", "prefill, decode, mixed"]),
    (["hardware=cpu"], ["model=llama3-70b", "does not fit on hardware=cpu"]),
    (["verify=true"], ["verify=True", "backend=jax"]),
    (["faults=random"], ["faults.", "backend=check", "faults=none"]),
    (["cluster_changes=3"], ["cluster_changes=3", "must be a list"]),
    (["cluster_changes=[3]"], ["cluster_changes=3", "must be a mapping"]),
    (["cluster_changes=[{at_s: 1}]"], ["exactly one of join and drain"]),
    (["cluster_changes=[{join: decode}]"], ["cluster_changes.at_s=None", "seconds"]),
    (["cluster_changes=[{at_s: 1, jon: decode}]"], ["cluster_changes.jon=decode", "at_s, join, drain"]),
    (["cluster_changes=[{at_s: 1, join: cook}]"], ["cluster_changes.join=cook", "prefill, decode, mixed"]),
    (["cluster_changes=[{at_s: 1, drain: d9}]"], ["cluster_changes.drain=d9", "p0, p1, d0, d1"]),
    (["cluster_changes=[{at_s: 1, drain: d0}, {at_s: 2, drain: d0}]"], ["drain=d0", "at 2 s; allowed: p0, p1, d1"]),
    (["cost=fitted", "hardware=h100x8"], ["a800x8", "h100x8"]),
    (["sched/prefill=custom"], ["sched.prefill._target_", "must be given"]),
    (["sched/prefill=custom", "sched.prefill._target_=Mine"], ["must be MODULE.NAME"]),
    (["sched/prefill=custom", "sched.prefill._target_=no_such.Mine"], ["no_such.Mine", "there is no module no_such"]),
    (["sched/prefill=custom", "sched.prefill._target_=my_policy.mine"], ["my_policy has no mine, did you mean Mine"]),
    (["sched/prefill=custom", "sched.prefill._target_=my_policy.NoMethod"], ["NoMethod", "lacks the method choose"]),
    (["sched/prefill=custom", "sched.prefill._target_=my_policy.Kills"], ["sched.prefill.signal", "needs a value"]),
    (
        ["sched/prefill=custom", "sched.prefill._target_=my_policy.Mine", "sched.prefill.alhpa=2"],
        ["sched.prefill.alhpa=2", "did you mean alpha"],
    ),
    (
        ["sched/prefill=custom", "sched.prefill._target_=my_policy.Mine", "sched.prefill.alpha=high"],
        ["sched.prefill.alpha=high", "a number"],
    ),
]


@pytest.mark.parametrize(("overrides", "words"), MISTAKES, ids=lambda value: " ".join(value))
def test_message_names_what_to_mend(mcjax: Command, place: Path, overrides: list[str], words: list[str]) -> None:
    answer = mcjax(*SMALL, *overrides)
    assert answer.status == 2
    for word in words:
        assert word in answer.err
    assert "Traceback" not in answer.err
    assert answer.err.startswith("mcjax: ")
    assert not runs(place), "nothing was run, so nothing is kept"


def test_debug_shows_where(mcjax: Command) -> None:
    answer = mcjax(*SMALL, "cluster=7x", "debug=true")
    assert answer.status == 2
    assert "Traceback" in answer.err
    assert "cluster_spec.py" in answer.err


def test_trace_block_size(mcjax: Command, trace: Path) -> None:
    answer = mcjax("experiment=mooncake_8p8d", f"workload.path={trace}", "kvpool.block_tokens=32")
    assert answer.status == 2
    assert "kvpool.block_tokens=32: the workload's block ids stand for 512 tokens; allowed: 512, null" in answer.err


def test_a_trace_of_ids_cannot_be_served_for_real(mcjax: Command, trace: Path) -> None:
    answer = mcjax("workload=mooncake", f"workload.path={trace}")
    assert answer.status == 2
    assert "workload=mooncake: names its blocks by ids and has no tokens" in answer.err
    assert "backend=sim" in answer.err
    assert "Traceback" not in answer.err


def test_bad_trace_line(mcjax: Command, trace: Path) -> None:
    lines = trace.read_text().splitlines()
    trace.write_text("\n".join([*lines[:2], lines[2].replace('"output_length": ', '"output_length": -')]) + "\n")
    answer = mcjax("experiment=mooncake_8p8d", f"workload.path={trace}")
    assert answer.status == 2
    assert f"{trace}, line 3, field 'output_length'" in answer.err
    assert "Traceback" not in answer.err


def test_runs_directory_that_cannot_be_made(mcjax: Command, place: Path) -> None:
    (place / "runs").write_text("a file is in the way")
    answer = mcjax(*SMALL)
    assert answer.status == 2
    assert len(answer.err.splitlines()) == 1
    assert "the run directory cannot be made" in answer.err


@pytest.mark.parametrize(
    ("name", "line"), [("Broken", 'return {}["missing"]'), ("Careless", 'raise ValueError("no luck")')]
)
def test_error_in_own_code_shows_own_lines_only(mcjax: Command, place: Path, name: str, line: str) -> None:
    answer = mcjax(*SMALL, "sched/prefill=custom", f"sched.prefill._target_=my_policy.{name}")
    assert answer.status == 1
    assert "an error in your own code" in answer.err
    assert line in answer.err
    files = [text for text in answer.err.splitlines() if text.lstrip().startswith("File ")]
    assert files
    assert all("my_policy.py" in text for text in files)


def test_module_that_imports_what_is_not_there(mcjax: Command, place: Path) -> None:
    (place / "other_policy.py").write_text("import not_installed_at_all\n")
    answer = mcjax(*SMALL, "sched/prefill=custom", "sched.prefill._target_=other_policy.Mine")
    assert answer.status == 1
    assert "import not_installed_at_all" in answer.err


def test_unknown_command(fresh: Command) -> None:
    answer = fresh("repaly", "runs/x")
    assert answer.status == 2
    assert "no command 'repaly'" in answer.err


@pytest.mark.check_long
def test_sweep_goes_on_after_a_point_that_fails(mcjax: Command, place: Path) -> None:
    answer = mcjax(*SMALL, "-m", "cluster=7x,2p2d,1p1d")
    assert answer.status == 1
    assert "1 of the sweep's 3 points failed" in answer.err
    assert "cluster=7x" in answer.err.splitlines()[-1]
    assert len(runs(place)) == 2
    assert all((run / "DONE").exists() for run in runs(place))


@pytest.mark.parametrize(
    ("value", "kind", "whether"),
    [
        (1, int, True),
        (1e9, int, True),
        (1.5, int, False),
        (True, int, False),
        (1, float, True),
        ("1", float, False),
        (None, int | None, True),
        (None, int, False),
        ("x", Literal["x", "y"], True),
        ("z", Literal["x", "y"], False),
        ([1], Sequence[int], True),
        (1, Sequence[int], False),
        ({}, dict[str, int], True),
        ("anything", object, True),
        ("anything", Any, True),
    ],
)
def test_fits(value: object, kind: Any, whether: bool) -> None:
    assert fits(value, kind) is whether


def test_described() -> None:
    assert described(int | None) == "a whole number or null"
    assert described(Literal["x", "y"]) == "one of x, y"


def test_arguments_of_what_takes_anything() -> None:
    def anything(**options: float) -> None: ...

    check_arguments("key", anything, {"a": 1})
    check_arguments("key", dict, {"a": 1})


def test_locate_nested() -> None:
    assert locate("key", "mcjax.cost.model_shape.ModelShape.read").__name__ == "read"
    with pytest.raises(ConfigError, match=r"key=mcjax.cost.model_shape.ModelShape.reed: .*did you mean read"):
        locate("key", "mcjax.cost.model_shape.ModelShape.reed")


def test_own_traceback_of_ours_is_empty() -> None:
    with pytest.raises(ConfigError) as caught:
        locate("key", "x")
    frames = caught.value.__traceback__
    assert frames is not None
    assert own_traceback(caught.value.with_traceback(frames.tb_next)) == ""
