"""Runs in an empty directory: in this process (`mcjax`, quick) or in one of its own (`fresh`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conf_options import write_needed
from conftest_app import POLICY, ROOT, Answer
from figures_fixtures import small_sweep

from mcjax.app import command
from mcjax.track.sweep import Sweep


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with `my_policy.py` in it."""
    (tmp_path / "my_policy.py").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.delitem(sys.modules, "my_policy", raising=False)
    return tmp_path


@pytest.fixture
def mcjax(place: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """The command line in this process."""

    def call(*arguments: str) -> Answer:
        capfd.readouterr()
        os.environ["HYDRA_FULL_ERROR"] = "0"
        status = command.main(arguments)
        captured = capfd.readouterr()
        return Answer(status, captured.out, captured.err)

    return call


@pytest.fixture
def fresh(place: Path) -> Callable[..., Answer]:
    """The command line, or `python -c`, in a process of its own."""

    def call(*arguments: str, code: str = "", timeout_s: float = 100) -> Answer:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100", "JAX_PLATFORMS": "cpu"}
        start = ["-c", code] if code else ["-m", "mcjax.cli"]
        done = subprocess.run(
            [sys.executable, *start, *arguments],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A Mooncake trace of 12 requests with a shared prefix."""
    path = tmp_path / "small.jsonl"
    rows = [
        {"timestamp": 500 * index, "input_length": 1200, "output_length": 8, "hash_ids": [0, 1, 10 + index]}
        for index in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def drawn_sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """A small simulated sweep, made once for the tests of figures and reports."""
    return small_sweep(tmp_path_factory.mktemp("figures"))


@pytest.fixture(scope="session")
def needed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the small files that some options of `conf/` read."""
    folder = tmp_path_factory.mktemp("needed")
    write_needed(folder)
    return folder
