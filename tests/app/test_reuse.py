"""A finished virtual run is taken again, and only where it is the same in every respect; a killed one never is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest_app import BARE, SMALL, Answer, runs

import mcjax as package
from mcjax.app import reuse
from mcjax.app.build import track_settings
from mcjax.app.compose import compose, plain_of
from mcjax.app.plugins import Plugins
from mcjax.app.provenance import Origin, provenance
from mcjax.errors import VerificationError
from mcjax.sched.base import PrefillChoice
from mcjax.track import keys
from mcjax.track.levels import LEVELS
from mcjax.track.run import load
from mcjax.track.runs import load_all
from mcjax.track.state import state_of

Command = Callable[..., Answer]
OWN = ("sched/prefill=custom", "sched.prefill._target_=my_policy.Mine")
CHECK = ("backend=check", "backend.schedules=2", "track.sinks.0.overview=false")


def play(*overrides: str, **strategies: Any) -> package.Run:
    return package.run([*SMALL, *overrides], progress=False, **strategies)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run in it, that of `SMALL`."""
    folder = tmp_path_factory.mktemp("kept") / "runs"
    play(f"track.sinks.0.directory={folder}")
    return folder


@pytest.fixture
def one(kept: Path, place: Path) -> Path:
    """The same run, in the working directory."""
    shutil.copytree(kept, place / "runs")
    return runs(place)[0]


def asked(*overrides: str) -> tuple[str, package.Run | None]:
    """The key of a config, and the run that would be taken for it."""
    config = compose([*SMALL, *overrides])
    plain = plain_of(config)
    plain["plugins"] = {}
    key = provenance(plain, Plugins({}), Origin()).record.run_key
    return key, reuse.finished(plain, key, track_settings(config).sinks)


def test_the_command_says_cached_and_shows_the_summary(mcjax: Command, place: Path) -> None:
    first = mcjax(*SMALL)
    assert "cached" not in first.out
    again = mcjax(*SMALL)
    assert again.status == 0
    (line,) = [line for line in again.out.splitlines() if "cached" in line]
    (kept,) = runs(place)
    assert str(kept.relative_to(place)) in line
    assert "goodput" in again.out
    assert again.out.splitlines()[-1] == f"run directory: {kept.relative_to(place)}"
    assert "cached" not in mcjax(*SMALL, "rerun=true").out
    assert len(runs(place)) == 2


def test_from_python_the_run_says_so(place: Path) -> None:
    first, again = play(), play()
    assert (first.cached, again.cached) == (False, True)
    assert first.directory == again.directory
    assert again.summary == first.summary
    assert "cached" in repr(again)
    assert play("rerun=true").directory != first.directory
    assert play().cached


@pytest.mark.parametrize(
    "same", ["debug=true", "question=why", "verify=false", "workload.sessions=6", "track.sinks.0.overview=false"]
)
def test_what_changes_no_row_is_taken_again(same: str, one: Path) -> None:
    _, found = asked(same)
    assert found is not None
    assert found.cached
    assert found.directory == one.relative_to(Path.cwd())


@pytest.mark.parametrize(
    "other", ["seed=1", "cluster=1p1d", "workload.sessions=7", "sched/prefill=random", "engine.wait_s=119", "slices=2"]
)
def test_another_config_has_another_key(other: str, one: Path) -> None:
    key, found = asked(other)
    assert found is None
    assert len(key) == 64
    assert key != load(one).record.run_key


@pytest.mark.parametrize(
    ("changed", "words", "enough"),
    [
        ({}, ["rerun=true"], False),
        ({}, ["track.warmup_s=1"], False),
        ({}, ["track.sample_period_s=0.5"], False),
        ({"track.sample_period_s": 0.5}, ["track.sample_period_s=0.5"], True),
        ({"track.sample_period_s": 0.5}, [], False),
        ({}, ["track.sinks.0.overview=true"], False),
        ({"overview.png": True}, ["track.sinks.0.overview=true"], True),
        ({}, ["track.sinks.0.directory=elsewhere"], False),
    ],
    ids=str,
)
def test_a_run_that_kept_something_else_does_not_do(
    changed: dict[str, Any], words: list[str], enough: bool, one: Path
) -> None:
    record = json.loads((one / "run.json").read_text())
    for name, value in changed.items():
        if name == "overview.png":
            (one / name).write_bytes(b"")
        else:
            record["config"][name] = value
    (one / "run.json").write_text(json.dumps(record))
    assert (asked(*words)[1] is not None) == enough


def test_a_run_that_a_tracker_has_not_heard_of_does_not_do(one: Path) -> None:
    config = compose(SMALL)
    plain, sinks, key = plain_of(config), track_settings(config).sinks, load(one).record.run_key
    plain["track"]["sinks"].append({"_target_": "my_tracker.Tracker"})
    assert reuse.finished(plain, key, sinks) is None


def test_what_is_kept_nowhere_is_never_taken_again(kept: Path, place: Path) -> None:
    shutil.copytree(kept, place / "runs")
    assert not package.run(BARE, progress=False).cached


def test_a_level_that_kept_less_does_not_do_and_one_that_kept_more_does(place: Path) -> None:
    least = LEVELS[0]
    assert not play(f"track.level={least}").cached
    assert play(f"track.level={least}").cached
    assert not play().cached
    assert play().cached
    assert play(f"track.level={least}").cached


def test_an_input_file_may_move_and_not_change(trace: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word for word in SMALL if not word.startswith("workload")]

    def one(path: str) -> package.Run:
        return package.run([*words, "workload=mooncake", f"workload.path='{path}'"], progress=False)

    first = one(str(trace))
    assert list(first.record.inputs) == [str(trace)]
    shutil.copy(trace, place / "renamed.jsonl")
    assert one("renamed.jsonl").cached
    (place / "folder").mkdir()
    shutil.move(trace, place / "folder" / "other.jsonl")
    monkeypatch.setenv("MCJAX_TRACES", str(place / "folder"))
    assert one("other.jsonl").cached
    with (place / "folder" / "other.jsonl").open("a") as file:
        row = {"timestamp": 9000, "input_length": 600, "output_length": 2, "hash_ids": [0, 99]}
        file.write(json.dumps(row) + "\n")
    changed = one("other.jsonl")
    assert not changed.cached
    assert changed.summary["requests"]["submitted"] == first.summary["requests"]["submitted"] + 1


def test_salts_of_tenants_count_and_are_not_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = play()
    (place / "salts.json").write_text('{"interactive": "pepper"}')
    monkeypatch.setenv("MCJAX_TENANT_SALTS_FILE", str(place / "salts.json"))
    salted = play()
    assert not salted.cached
    assert salted.summary["digest"] != first.summary["digest"]
    assert salted.record.inputs == {}
    assert play().cached


def test_own_code_is_kept_and_counts(fresh: Command, place: Path) -> None:
    assert fresh(*SMALL, *OWN).status == 0
    assert "cached" in fresh(*SMALL, *OWN).out
    (kept,) = runs(place)
    assert (kept / "strategies" / "my_policy.py").read_text() == (place / "my_policy.py").read_text()
    source = load(kept).record.strategies["prefill"]
    assert (source.name, source.files) == ("my_policy.Mine", ("strategies/my_policy.py",))
    with (place / "my_policy.py").open("a") as file:
        file.write("\nTHRESHOLD = 3\n")
    assert "cached" not in fresh(*SMALL, *OWN).out
    hashes = {load(directory).record.strategies["prefill"].sha256 for directory in runs(place)}
    assert len(hashes) == 2


class Pick:
    """Chooses one instance, always."""

    def __init__(self, which: int = 0, note: Any = None):
        self.which, self.note = which, note

    def choose(self, request: Any, view: Any, rng: np.random.Generator) -> PrefillChoice:
        return PrefillChoice(self.which)


class Counts(Pick):
    """Changes as it is used."""

    def choose(self, request: Any, view: Any, rng: np.random.Generator) -> PrefillChoice:
        self.which = 1 - self.which
        return PrefillChoice(self.which)


def test_objects_count_by_code_and_parameters(place: Path) -> None:
    first = play(prefill=Pick(1))
    assert not first.cached
    assert first.record.strategies["prefill"].name == "Pick(which=1)"
    assert play(prefill=Pick(1)).cached
    assert not play(prefill=Pick(0)).cached
    assert not play(prefill=Pick(1, np.zeros(2))).cached
    assert play(prefill=Pick(1, np.zeros(2))).cached
    assert not play(prefill=Pick(1, np.ones(2))).cached


def test_an_object_that_changes_as_it_is_used_is_another_one_then(place: Path) -> None:
    own = Counts(0)
    first = play(prefill=own)
    own.which = 0
    assert play(prefill=own).directory == first.directory
    own.which = 1
    assert not play(prefill=own).cached
    assert play(prefill=Counts(1)).cached


def test_what_cannot_be_told_is_never_reused(place: Path) -> None:
    run = play(prefill=Pick(1, iter([1])))
    assert run.record.run_key == ""
    assert run.record.unkeyed == "prefill: note: what a builtins.list_iterator holds cannot be told"
    assert not play(prefill=Pick(1, iter([1]))).cached


def test_a_campaign_is_taken_again_unless_it_found_something(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = package.run(CHECK, progress=False)
    assert package.run(CHECK, progress=False).directory == first.directory
    from mcjax.app import campaign

    real = campaign.run_schedule

    def broken(*arguments: Any) -> Any:
        outcome = real(*arguments)
        outcome.problems.append("wrong")
        return outcome

    monkeypatch.setattr(campaign, "run_schedule", broken)
    for _ in range(2):
        with pytest.raises(VerificationError):
            package.run([*CHECK, "seed=9"], progress=False)
    assert len(runs(place)) == 3


@pytest.mark.parametrize("harm", ["killed", "failed", "no table", "no record", "moved", "another key"])
def test_what_is_no_whole_run_of_the_key_is_not_taken(harm: str, one: Path) -> None:
    assert asked()[1] is not None
    if harm == "killed":
        (one / "DONE").rename(one / "RUNNING")
    elif harm == "failed":
        (one / "DONE").rename(one / "FAILED")
    elif harm == "no table":
        (one / "requests.parquet").write_bytes(b"PAR1")
    elif harm == "no record":
        (one / "run.json").write_text("{")
    elif harm == "moved":
        one.rename(one.parent / "mine")
    else:
        record = json.loads((one / "run.json").read_text())
        (one / "run.json").write_text(json.dumps({**record, "run_key": "0" * 64}))
    assert asked()[1] is None


def test_a_real_run_is_never_taken_again(one: Path) -> None:
    config = compose(SMALL)
    plain, sinks, key = plain_of(config), track_settings(config).sinks, load(one).record.run_key
    assert reuse.finished(plain, key, sinks) is not None
    plain["backend"]["name"] = "jax"
    assert reuse.finished(plain, key, sinks) is None


KILLED = """
import os, random, signal, sys, time
from mcjax.app.command import main

def ended_at_change(left):
    '''Ends this process at its so-manieth change of a file below runs/.'''
    def count(event, arguments):
        nonlocal left
        names = [str(name) for name in arguments[:2] if isinstance(name, (str, os.PathLike))]
        reads = event == "open" and not (arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if event in ("open", "os.mkdir", "os.rename") and not reads and any("runs" in name for name in names):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
    sys.addaudithook(count)

rng = random.Random(1)
words = sys.argv[1:]
main([*words, "rerun=true"])  # so that everything is imported before the forks
for moment in [0, 2, 3, 4, 5, *rng.sample(range(6, 24), 2), *[None] * 2]:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        if moment is not None:
            ended_at_change(moment)
        os._exit(main([*words, "rerun=true"]))
    if moment is None:
        time.sleep(rng.uniform(0, 0.3))
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.mark.check_long
def test_killed_at_any_moment_it_is_refused_with_a_reason(fresh: Command, place: Path) -> None:
    answer = fresh(*SMALL, code=KILLED)
    assert answer.status == 0, answer.err
    found = load_all(runs(place))
    assert {run.state for run in found} == {"done"}
    assert len(found.refused) >= 3  # the first moments are before there is a directory
    for directory, reason in found.refused:
        assert directory in reason
        assert "was killed" in reason
        assert state_of(Path(directory))[0] == "killed"
    whole = package.run(SMALL, progress=False)
    assert whole.cached
    assert str(whole.directory) in [str(run.directory.relative_to(place)) for run in found if run.directory is not None]


def test_the_index_is_beside_the_runs(one: Path) -> None:
    key = load(one).record.run_key
    assert [path.name for path in keys.directories(one.parent, key)] == [one.name]
    assert package.load(key[:10]).directory == Path("runs") / one.name
