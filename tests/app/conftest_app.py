"""What the tests of the command line share: small configs, a user's module, and where runs lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mcjax.track.find import directories

ROOT = Path(__file__).resolve().parents[2]
SIM = ("backend=sim", "workload=synthetic", "hardware=a800x8", "model=llama3-70b", "cluster=2p2d")
SMALL = (*SIM, "workload.sessions=6", "track.sinks.0.overview=false")
BARE = (*SIM, "workload.sessions=6", "track=none")

POLICY = '''
import os, signal
from dataclasses import dataclass
from mcjax.sched.base import PrefillChoice

@dataclass
class Mine:
    alpha: float = 1.0
    def choose(self, request, view, rng):
        return PrefillChoice(int((self.alpha * view.queue_s).argmin()))

class Kills:
    """Sends this process a signal at its third choice."""
    def __init__(self, signal: int):
        self.signal, self.calls = signal, 0
    def choose(self, request, view, rng):
        self.calls += 1
        if self.calls == 3:
            os.kill(os.getpid(), self.signal)
        return PrefillChoice(0)

class Broken:
    def choose(self, request, view, rng):
        return self.helper()
    def helper(self):
        return {}["missing"]

class NoMethod:
    pass

class Careless:
    def __init__(self):
        raise ValueError("no luck")
'''


@dataclass
class Answer:
    status: int
    out: str
    err: str


def runs(place: Path) -> list[Path]:
    """The run directories, in order of their names."""
    return directories(place / "runs")
