"""What a word on the command line means."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from mcjax.errors import RunError
from mcjax.track import find, keys, sweep
from mcjax.track.record import FILE, RunRecord
from mcjax.track.state import state_of
from mcjax.track.sweep import Point, Sweep


def make(base: Path, name: str, key: str = "", marker: str = "DONE", note: str = "") -> Path:
    directory = base / name
    directory.mkdir(parents=True)
    (directory / marker).write_text(note)
    (directory / FILE).write_text(RunRecord(run_key=key).text())
    return directory


def test_a_directory_and_a_name(tmp_path: Path) -> None:
    first = make(tmp_path, "first")
    assert find.find_one(first, tmp_path / "elsewhere") == first
    assert find.find_one("first", tmp_path) == first
    with pytest.raises(RunError, match="nix: no such run"):
        find.find_one("nix", tmp_path)


@pytest.mark.parametrize("indexed", [True, False], ids=["noted", "brought from elsewhere"])
def test_a_key_names_the_newest_of_equal_runs(indexed: bool, tmp_path: Path) -> None:
    make(tmp_path, "2025-01", "abcd11")
    newest = make(tmp_path, "2025-02", "abcd11")
    make(tmp_path, "2025-03", "abcd11", "FAILED")
    other = make(tmp_path, "2025-04", "abcd22")
    if indexed:
        for name, key in (("2025-01", "abcd11"), ("2025-02", "abcd11"), ("2025-03", "abcd11"), ("2025-04", "abcd22")):
            keys.add(tmp_path, key, name)
    assert find.find_one("abcd1", tmp_path) == newest
    assert find.find_one("abcd22", tmp_path) == other
    with pytest.raises(RunError, match=r"2 runs with keys that begin so \(abcd11, abcd22\)"):
        find.find_one("abcd", tmp_path)
    with pytest.raises(RunError, match="none"):
        find.find_one("0123", tmp_path)
    with pytest.raises(RunError, match="no such run"):
        find.find_one("abc", tmp_path)  # too short to be a key


def test_a_key_file_that_lies_is_not_believed(tmp_path: Path) -> None:
    make(tmp_path, "run", "abcd11")
    keys.add(tmp_path, "abcd99", "run")
    with pytest.raises(RunError, match="0 runs"):
        find.find_one("abcd9", tmp_path)


def test_patterns_and_sweeps(tmp_path: Path) -> None:
    runs = [make(tmp_path, f"run-{index}") for index in range(3)]
    (tmp_path / "no run").mkdir()
    points = [Point(("seed=1",), directory="run-2", state=sweep.DONE), Point(("seed=2",))]
    Sweep(tmp_path / sweep.FOLDER / "mine", points=points).write()
    assert find.find([str(tmp_path / "*")], tmp_path).directories == runs
    found = find.find(["mine", "run-1", "run-2"], tmp_path)
    assert found.directories == [runs[2], runs[1]]
    assert [one.name for one in found.sweeps] == ["mine"]
    with pytest.raises(RunError, match="no run matches"):
        find.find(["other-*"], tmp_path)
    with pytest.raises(RunError, match="3 runs, where one is wanted"):
        find.find_one(str(tmp_path / "run-*"), tmp_path)


def test_hidden_folders_sweeps_and_wandb_are_no_runs(tmp_path: Path) -> None:
    run = make(tmp_path, "run")
    for name in (keys.FOLDER, sweep.FOLDER, "wandb", ".0123.new"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("")
    assert find.directories(tmp_path) == [run]
    assert find.directories(tmp_path / "none") == []


def test_how_a_run_stands(tmp_path: Path) -> None:
    def marked(name: str, marker: str, note: str) -> tuple[str, str]:
        return state_of(make(tmp_path, name, marker=marker, note=note))

    def owner(pid: int, host: str) -> str:
        return json.dumps({"pid": pid, "host": host})

    assert marked("a", "DONE", "") == ("done", "")
    assert marked("b", "FAILED", "no luck\n") == ("failed", "no luck")
    assert marked("c", "RUNNING", owner(os.getpid(), socket.gethostname()))[0] == "running"
    assert marked("d", "RUNNING", owner(2**22 + 1, socket.gethostname()))[0] == "killed"
    assert marked("e", "RUNNING", owner(1, "another-host")) == (
        "running",
        "running or killed: process 1 on another-host",
    )
    assert marked("f", "RUNNING", "half a wri")[0] == "killed"
    (tmp_path / "f" / "DONE").write_text("")
    (tmp_path / "f" / "RUNNING").unlink()
    assert state_of(tmp_path / "f") == ("done", "")
    (tmp_path / "g").mkdir()
    assert state_of(tmp_path / "g") == ("", "")
