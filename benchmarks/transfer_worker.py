"""One side of one system in `transfer.py`: a process that does as it is told, by lines of JSON on its standard input.

    python transfer_worker.py SYSTEM ROLE SOURCE_FD TARGET_FD NBYTES

Both sides map the same two memory files: what every system reads, and where it has to land.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transfer_systems import SYSTEMS, Buffers, Plan, System


def mapped(fd: int, nbytes: int) -> NDArray[np.uint8]:
    """A memory file, every page of it in this process's page table."""
    memory = mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return np.frombuffer(memory, np.uint8)


def cpu_s(pid: int) -> float:
    """CPU seconds of another process, all threads, as the kernel counts them for its clock."""
    return time.clock_gettime((~pid << 3) | 2)


class Worker:
    def __init__(self, system: System, buffers: Buffers):
        self._system = system
        self._buffers = buffers
        self._peer = os.getpid()

    def describe(self) -> Any:
        return self._system.describe()

    def connect(self, description: Any, pid: int) -> None:
        self._peer = pid
        self._system.connect(description)

    def sample(self, plan: dict[str, Any], verified: bool) -> dict[str, float]:
        """Move all that the plan says once: seconds of the wall and of both sides' CPUs, and how many bytes."""
        planned = Plan(**plan)
        steps = self._system.prepared(planned, verified)
        gc.disable()
        peer_s = 0.0 if self._peer == os.getpid() else cpu_s(self._peer)
        own_s, wall_s = time.process_time(), time.perf_counter()
        for step in steps:
            step()
        wall_s, own_s = time.perf_counter() - wall_s, time.process_time() - own_s
        peer_s = 0.0 if self._peer == os.getpid() else cpu_s(self._peer) - peer_s
        gc.enable()
        return {"wall_s": wall_s, "own_s": own_s, "peer_s": peer_s, "nbytes": planned.nbytes}

    def latencies(self, nbytes: int, count: int) -> list[float]:
        """Seconds of each of `count` reads, one after the other."""
        (step,) = self._system.prepared(Plan(nbytes, 1, 1, 1), False)
        for _ in range(20):
            step()
        found: list[float] = []
        gc.disable()
        for _ in range(count):
            start_s = time.perf_counter()
            step()
            found.append(time.perf_counter() - start_s)
        gc.enable()
        return found

    def check(self, plan: dict[str, Any]) -> bool:
        """Whether the plan's bytes land where they should: an untimed run into zeros."""
        planned, target = Plan(**plan), self._buffers.target
        target[:] = 0
        for step in self._system.prepared(planned, False):
            step()
        spans = planned.spans(len(target))
        size = planned.block_bytes
        return all(
            np.array_equal(target[to : to + size], self._buffers.source[at : at + size])
            for batch in spans
            for to, at in zip(batch.local.tolist(), batch.remote.tolist(), strict=True)
        )

    def loop(self, plan: dict[str, Any], seconds: float) -> int:
        """The plan again and again, for a profiler that watches; how often."""
        steps, until_s, times = self._system.prepared(Plan(**plan), False), time.monotonic() + seconds, 0
        while time.monotonic() < until_s:
            for step in steps:
                step()
            times += 1
        return times

    def close(self) -> None:
        self._system.close()


def main(arguments: list[str]) -> int:
    name, role, source, target, nbytes = arguments
    kind = SYSTEMS[name]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that tell of themselves on standard output do not disturb the answers
    buffers = Buffers(mapped(int(source), int(nbytes)), mapped(int(target), int(nbytes)))
    try:
        worker = Worker(kind.make(role, buffers), buffers)
    except Exception as problem:
        print(json.dumps({"error": f"{type(problem).__name__}: {problem}"}), file=answers, flush=True)
        return 1
    print(json.dumps({"answer": os.getpid()}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        what = order.pop("do")
        try:
            answer = {"answer": getattr(worker, what)(**order)}
        except Exception as problem:
            answer = {"error": f"{type(problem).__name__}: {problem}"}
        print(json.dumps(answer), file=answers, flush=True)
        if what == "close":
            break
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # some libraries do not survive their own ends
