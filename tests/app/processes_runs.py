"""Run as a program: plays one run over processes, does a worker harm in the middle of it, and looks what is left.

`python processes_runs.py VICTIM SIGNAL CHOICE [override ...]`: when a prefill instance is chosen for the
CHOICE-th time (0: never) VICTIM's process gets the signal. Prints what came of it as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

import mcjax
from mcjax.app.replay import replay
from mcjax.backends.processes.spawn import WorkerProcess
from mcjax.sched.base import PrefillChoice

COMMON = ("launcher=processes", "track.sinks.0.overview=false", "workload.rate_per_s=100")


class Harms:
    """Spreads prompts over instances; its choice number `choice` does the harm first."""

    def __init__(self, pids: Mapping[str, int], victim: str = "", number: int = 0, choice: int = 0):
        self._pids = pids
        self._victim, self._number, self._choice = victim, number, choice
        self._calls = 0

    def choose(self, request: Any, view: Any, rng: Any) -> PrefillChoice:
        self._calls += 1
        if self._calls == self._choice:
            os.kill(self._pids[self._victim], self._number)
        return PrefillChoice(request.request_id % len(view.queue_s))


def watched() -> dict[str, int]:
    """The processes of workers by name, as they are started."""
    pids: dict[str, int] = {}
    made = WorkerProcess.__init__

    def make(self: WorkerProcess, name: str, *args: Any, **options: Any) -> None:
        made(self, name, *args, **options)
        pids[name] = self.pid

    setattr(WorkerProcess, "__init__", make)  # noqa: B010  (a replacement that no type allows)
    return pids


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def held() -> dict[str, int]:
    gc.collect()  # what a request's error refers to is let go of with it
    return {"descriptors": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}


def main(victim: str, signal_name: str, choice: str, *overrides: str) -> None:
    pids = watched()
    before = held()
    harms = Harms(pids, victim, getattr(signal, signal_name), int(choice))
    run = mcjax.run([*COMMON, *overrides], progress=False, prefill=harms)
    jax, after = "jax" in sys.modules, held()
    events = run.events.to_pylist()
    told: dict[str, Any] = {
        "state": run.state,
        "requests": run.summary["requests"],
        "processes": run.summary["processes"],
        "verified": run.summary.get("verified"),
        "bytes": run.summary["bytes_by_transport"],
        "late": run.summary["compilations_after_warm_up"],
        "deaths": [event["place"] for event in events if event["kind"] == "death"],
        "retries": sum(event["kind"] == "retry" for event in events),
        "jax": jax,
        "held": {"before": before, "after": after},
        "left": [name for name, pid in pids.items() if exists(pid)],
    }
    if run.state == "done" and run.directory is not None:
        replayed = replay(mcjax.load(run.directory), prefill=Harms({}))
        told["replay"] = [replayed.agrees, list(map(str, replayed.differences))]
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
