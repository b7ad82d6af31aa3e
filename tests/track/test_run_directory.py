"""Markers, secrets, what describes the environment, and reading a run back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from track_fixtures import ARGUMENTS, fabricate

from mcjax.errors import ConfigError, RunError
from mcjax.track import environment
from mcjax.track.redaction import redact, secrets
from mcjax.track.run import load
from mcjax.track.run_directory import RunDirectory
from mcjax.track.sinks.base import RunInfo
from mcjax.track.sinks.files import Files
from mcjax.track.state import MARKERS
from mcjax.track.summary import summarise
from mcjax.track.tracker import Settings, Tracker


def markers(path: Path) -> list[str]:
    return [name for name in MARKERS if (path / name).exists()]


def keep(base: Path, failure: str = "", **summary: Any) -> Path:
    """A whole run under `base`."""
    tracker = Tracker([Files(str(base), overview=False)], RunInfo("sim", 7, "run", {"seed": 7}, {"argv": ["mcjax"]}))
    tables = fabricate().tables()
    tracker.finish(tables, {**summarise(tables, **ARGUMENTS), **summary}, failure)
    assert tracker.directory is not None
    return tracker.directory


def test_markers_follow_one_another(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path)
    assert markers(directory.path) == ["RUNNING"]
    assert json.loads((directory.path / "RUNNING").read_text())["pid"] == os.getpid()
    directory.done()
    assert markers(directory.path) == ["DONE"]
    other = RunDirectory.create(tmp_path)
    other.failed("out of memory")
    assert markers(other.path) == ["FAILED"]
    assert (other.path / "FAILED").read_text() == "out of memory\n"


def test_no_run_overwrites_another(tmp_path: Path) -> None:
    paths = [RunDirectory.create(tmp_path, "same").path.name for _ in range(3)]
    assert paths == ["same", "same-2", "same-3"]
    dated = {RunDirectory.create(tmp_path).path for _ in range(3)}
    assert len(dated) == 3


def test_a_killed_run_leaves_running_with_its_pid(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from mcjax.track.run_directory import RunDirectory;"
        "from mcjax.track.recorder import TableRecorder; recorder = TableRecorder(lambda block: b'');"
        "recorder.write_to(RunDirectory.create(Path(sys.argv[1]), 'killed').path);"
        "[recorder.event(index, 'hit', index, 'n0', detail='x' * 1000) for index in range(20_000)];"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
    with pytest.raises(RunError, match=rf"killed: unfinished, process {child.pid}, which ran it, was killed"):
        load(tmp_path / "killed")
    child.wait()
    assert json.loads((tmp_path / "killed" / "RUNNING").read_text())["pid"] == child.pid
    assert (tmp_path / "killed" / "events.parquet.part").exists()
    with pytest.raises(RunError, match=rf"killed: unfinished, process {child.pid}, which ran it, was killed"):
        load(tmp_path / "killed")


def test_a_run_comes_back(tmp_path: Path) -> None:
    path = keep(tmp_path)
    run = load(str(path))
    assert run.state == "done"
    assert run.config == {"seed": 7}
    assert run.summary == json.loads((path / "summary.json").read_text())
    assert run.requests.to_pandas()["state"].tolist().count("completed") == 3
    assert run.events.num_rows == 7
    assert run.decisions.num_rows == 3
    assert run.reports.num_rows == 2
    assert run.samples.num_rows == 2
    assert run.outcomes.num_rows == 0
    assert run.requests is run.requests
    assert "2 of 4 requests completed" in repr(run)
    assert "<table>" in run._repr_html_()
    assert sorted(file.name for file in path.iterdir()) == sorted(
        ["DONE", "config.yaml", "environment.json", "run.json", "summary.json"]
        + [f"{name}.parquet" for name in ("requests", "events", "decisions", "reports", "samples")]
    )


def test_the_run_handed_back_equals_the_run_on_disk(tmp_path: Path) -> None:
    tables = fabricate().tables()
    info = RunInfo("sim", 7, "run", {"seed": 7})
    handed = Tracker([], info).finish(tables, {"goodput_rps": float("nan"), "schema": 1})
    assert handed.directory is None
    assert handed.summary == {"goodput_rps": None, "schema": 1}
    assert handed.events is tables["events"]
    assert "in memory" in repr(handed)


def test_an_interrupted_run_loads_with_its_reason(tmp_path: Path) -> None:
    run = load(keep(tmp_path, failure="interrupted"))
    assert run.state == "failed"
    assert run.reason == "interrupted"
    assert run.requests.num_rows == 5


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such directory"):
        load(tmp_path / "nowhere")
    with pytest.raises(RunError, match="no run directory"):
        load(tmp_path)
    running = RunDirectory.create(tmp_path, "running").path
    with pytest.raises(RunError, match=rf"running: unfinished, process {os.getpid()} is running it"):
        load(running)
    tracker = Tracker([Files(str(tmp_path))], RunInfo("sim", 1, "early"))
    tracker.abandon("no such trace")
    with pytest.raises(RunError, match=r"early: the run failed before it had tables: no such trace"):
        load(tmp_path / "early")
    with pytest.raises(RunError, match="schema version 0"):
        load(keep(tmp_path / "old", schema=0))
    path = keep(tmp_path / "damaged")
    (path / "events.parquet").write_bytes(b"PAR1")
    with pytest.raises(RunError, match=r"events\.parquet is missing or damaged"):
        load(path)
    (path / "summary.json").write_text("{")
    with pytest.raises(RunError, match=r"summary\.json is damaged"):
        load(path)


def test_secrets_never_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"MY_API_KEY": 'a"b\\c-é-k1', "db_password": "hunter2", "TENANT_SALT_A": "hunter2-longer"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("COLOUR", "visible")
    directory = RunDirectory.create(tmp_path)
    spoken = " ".join(values.values()) + " visible false"
    directory.write_config({"says": spoken, "nested": [{spoken: [spoken]}], "flag": False})
    directory.write_environment(environment.describe(argv=["mcjax", f"x={spoken}"], seed=1))
    directory.write_summary({"text": spoken})
    directory.failed(spoken)
    for path in directory.path.iterdir():
        text = path.read_text(encoding="utf-8")
        decoded = text + (str(json.loads(text)) if path.suffix == ".json" else "")
        assert not any(value in decoded for value in values.values()), path.name
    assert "<redacted> <redacted> <redacted> visible false" in (directory.path / "FAILED").read_text()


def test_redaction_leaves_the_rest_alone() -> None:
    assert secrets({"A_KEY": "abcd", "B_TOKEN": "true", "SALT": "ab", "OTHER": "visible"}) == ["abcd"]
    assert redact({"a": ["xabcdx", 1, None], "b": True}, ["abcd"]) == {"a": ["x<redacted>x", 1, None], "b": True}


def test_environment_says_what_ran(tmp_path: Path) -> None:
    found = environment.describe(
        argv=["mcjax", "seed=3"], seed=3, devices=["cpu:0"], inputs={"t": "ab"}, source=tmp_path
    )
    assert found["argv"] == ["mcjax", "seed=3"]
    assert found["seed"] == 3
    assert found["devices"] == ["cpu:0"]
    assert found["inputs"] == {"t": "ab"}
    assert "numpy" in found["packages"]
    assert found["revision"] is None
    assert environment.installed(["numpy", "surely-no-such-package"]).keys() == {"numpy"}


def test_environment_holds_the_dirty_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("one\n")
    assert environment.source_state(tmp_path)["revision"] is None
    git("add", ".")
    git("commit", "-m", "first")
    clean = environment.source_state(tmp_path)
    assert len(clean["revision"]) == 40
    assert clean["diff"] == ""
    # A folder that only lies inside the tree is no part of it.
    assert environment.source_state(tmp_path / "inner")["revision"] is None
    (tmp_path / "a.py").write_text("two\n")
    (tmp_path / "b.py").write_text("new\n")
    dirty = environment.source_state(tmp_path)
    assert "+two" in dirty["diff"]
    assert dirty["untracked"] == ["b.py"]
    monkeypatch.setattr(environment, "DIFF_BYTES", 10)
    assert environment.source_state(tmp_path)["diff_cut"]
    assert len(environment.source_state(tmp_path)["diff"]) == 10


@pytest.mark.parametrize(("key", "value"), [("warmup_s", -1.0), ("level", "loud"), ("sample_period_s", 0.0)])
def test_settings_name_the_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"track.{key}={value}"):
        Settings(**{key: value})  # type: ignore[arg-type]
