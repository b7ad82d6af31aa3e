"""Replays on several cores: worker processes that are handed one replay after the other, and end with their parent."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import IO, Any, cast

from mcjax.app.hit_rates.replay import Chains
from mcjax.errors import RunError
from mcjax.kvpool.base import Watermark


@dataclass(frozen=True, slots=True)
class Task:
    """A replay of one trace through one pool. `policy` is a key of the `Stock`'s, or `belady`."""

    trace: str
    policy: str
    capacity: int
    """Blocks."""


@dataclass(frozen=True, slots=True)
class Stock:
    """What every worker gets once: traces, and strategies of which each replay takes a copy."""

    traces: Mapping[str, Chains]
    policies: Mapping[str, Any]
    watermark: Watermark


def in_order(stock: Stock, tasks: Sequence[Task], processes: int) -> Generator[tuple[Task, list[int]]]:
    """Every task's result, as they come. Raises `RunError` if a worker dies.

    Workers are processes of their own, not forks: the caller may run threads. Whatever ends the iteration ends them.
    """
    pickler: Any = importlib.import_module("cloudpickle")  # strategies may come from a notebook or a script
    told: bytes = pickler.dumps(stock)
    with ExitStack() as stack:
        idle: SimpleQueue[_Worker] = SimpleQueue()
        for _ in range(processes):
            worker = _Worker(told)
            stack.callback(worker.end)
            idle.put(worker)

        def play(task: Task) -> tuple[Task, list[int]]:
            worker = idle.get()
            try:
                return task, worker.play(task)
            finally:
                idle.put(worker)

        threads = stack.enter_context(ThreadPoolExecutor(processes))
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        for future in as_completed([threads.submit(play, task) for task in tasks]):
            yield future.result()


class _Worker:
    """`python -m mcjax.app.hit_rates.worker`, which reads pickles from its standard input and answers each with one."""

    def __init__(self, told: bytes):
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mcjax.app.hit_rates.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C of the terminal reaches the parent, which ends its workers
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self._write(told)

    def play(self, task: Task) -> list[int]:
        self._write(pickle.dumps(task))
        try:
            answer = pickle.load(cast("IO[bytes]", self._process.stdout))
        except (EOFError, pickle.UnpicklingError):
            raise RunError(f"a worker process ended by itself (status {self._process.wait()}): {task}") from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _write(self, data: bytes) -> None:
        stdin = cast("IO[bytes]", self._process.stdin)
        try:
            stdin.write(len(data).to_bytes(8, "little") + data)
            stdin.flush()
        except BrokenPipeError:
            raise RunError(f"a worker process ended by itself (status {self._process.wait()})") from None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what a dead worker was still to be told
                    pipe.close()


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
