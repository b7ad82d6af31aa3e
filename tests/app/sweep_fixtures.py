"""What the tests of sweeps share: strategies that wait, die and press keys, and a command line that can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from conftest_app import ROOT

from mcjax.track import sweep as records
from mcjax.track.find import directories
from mcjax.track.sweep import Sweep

DEADLINE_S = 120
"""A wait that takes longer has failed."""

POLICIES = '''
import glob, os, signal, time
from mcjax.sched.base import PrefillChoice

class Shortest:
    """Takes the shortest queue. Waits in mid-run once `enough` runs are done, unless told to go on.

    Told by the environment: a file that the source names would be an input, and part of the run's key.
    """
    enough = 10**9
    def __init__(self):
        self.calls = 0
    def choose(self, request, view, rng):
        self.calls += 1
        if self.calls == 3 and self.enough == 0:
            print("waits")
        while self.calls == 3 and len(glob.glob("runs/*/DONE")) >= self.enough and "GO_ON" not in os.environ:
            time.sleep(0.02)
        return PrefillChoice(int(view.queue_s.argmin()))

class WaitsAtOnce(Shortest):
    enough = 0

class WaitsAfterTwo(Shortest):
    enough = 2

class AlsoWaitsAfterTwo(WaitsAfterTwo):
    def choose(self, request, view, rng):
        super().choose(request, view, rng)
        return PrefillChoice(0)

class Tells(Shortest):
    def choose(self, request, view, rng):
        if self.calls == 0:
            print("played by", os.getpid(), "for", os.getppid())
        return super().choose(request, view, rng)

class Broken(Shortest):
    def choose(self, request, view, rng):
        return {}["missing"]

class Exits(Shortest):
    def choose(self, request, view, rng):
        print("so long")
        os._exit(3)

class Killed(Shortest):
    def choose(self, request, view, rng):
        os.kill(os.getpid(), signal.SIGKILL)
'''


def start(place: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "mcjax.cli", *arguments],
        cwd=place,
        env={**os.environ, **environment, "PYTHONPATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def read_until(process: subprocess.Popen[str], *wanted: str) -> str:
    """What it prints until it has said each of `wanted`. Raises `AssertionError` if it ends before."""
    assert process.stdout is not None
    said = ""
    while not all(text in said for text in wanted):
        line = process.stdout.readline()
        assert line, f"it ended, having said {said}"
        said += line
    return said


def wait_until(what: str, true: Callable[[], Any]) -> None:
    """Raises `AssertionError` if it does not become true."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline_s, f"waited in vain: {what}"
        time.sleep(0.02)


def running(place: Path) -> list[Path]:
    """The runs that are being played, or were when they were killed."""
    return [
        path for path in directories(place / "runs") if (path / "RUNNING").exists() and (path / "run.json").exists()
    ]


def workers(place: Path) -> list[int]:
    """The processes that play them."""
    return [json.loads((path / "RUNNING").read_text())["pid"] for path in running(place)]


def alive(pid: int) -> bool:
    """Whether the process is there, and more than an entry that nobody has asked for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def sweeps(place: Path) -> list[Sweep]:
    return [records.read(path) for path in sorted((place / "runs" / "sweeps").iterdir())]


def states(found: Sweep) -> list[str]:
    return [point.state for point in found.points]


def write_trace(path: Path, requests: int) -> Path:
    """A Mooncake trace of pairs that share a prefix."""
    rows: Sequence[dict[str, Any]] = [
        {"timestamp": 500 * i, "input_length": 1200, "output_length": 8, "hash_ids": [i // 2, 100 + i, 200 + i]}
        for i in range(requests)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
