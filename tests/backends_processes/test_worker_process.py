"""A worker process does not outlive its controller, and ends when it is told to, or told nonsense."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mcjax.backends.processes.frames import Message, encode
from mcjax.backends.processes.spawn import WorkerProcess
from mcjax.errors import ConfigError

DEADLINE_S = 30.0
CONTROLLER = """
import sys, time
from mcjax.backends.processes.spawn import WorkerProcess
workers = [WorkerProcess(f"p{index}", *sys.argv[1:]) for index in range(2)]
print(*[worker.pid for worker in workers], flush=True)
time.sleep(600)
"""


def wait_until(what: str, condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether it runs: who has ended and waits to be asked how, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("prefix", ["", "nice -n 1"])
@pytest.mark.parametrize("after_s", [0.0, 1.0])
def test_workers_end_with_a_controller_that_is_killed(prefix: str, after_s: float) -> None:
    process = subprocess.Popen([sys.executable, "-c", CONTROLLER, prefix], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = list(map(int, process.stdout.readline().split()))
    assert len(pids) == 2
    assert all(map(alive, pids))
    time.sleep(after_s)  # at once: before they could arrange for it; later: while they wait
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until("the workers are gone", lambda: not any(map(alive, pids)))


def test_a_closed_socket_ends_it() -> None:
    worker = WorkerProcess("p0")
    worker.socket.close()
    wait_until("it has ended", lambda: not alive(worker.pid))
    assert worker.death().startswith("ended with status 1")


@pytest.mark.parametrize("nonsense", [b"nonsense, and enough of it", encode(Message("run"))])
def test_nonsense_ends_it(nonsense: bytes) -> None:
    worker = WorkerProcess("p0")
    worker.socket.sendall(nonsense)
    wait_until("it has ended", lambda: not alive(worker.pid))
    assert worker.death().startswith("ended with status 1")
    worker.socket.close()


def test_one_that_stands_still_is_ended_by_force() -> None:
    worker = WorkerProcess("p0")
    os.kill(worker.pid, signal.SIGSTOP)
    worker.end(0.2)
    assert not alive(worker.pid)
    assert worker.death().startswith("ended by SIGKILL")
    worker.socket.close()


def test_what_it_prints_bears_its_name_and_is_told_of_its_death(capfd: pytest.CaptureFixture[str]) -> None:
    worker = WorkerProcess("d7", "sh -c 'echo no such place >&2; exit 3'")
    wait_until("it has ended", lambda: not alive(worker.pid))
    assert worker.death() == "ended with status 3\nno such place"
    assert "[d7] no such place" in capfd.readouterr().err
    worker.socket.close()


def test_a_prefix_that_cannot_be_run_is_named() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"launcher\.command\.p0=/no/such/thing -x: cannot be run"):
        WorkerProcess("p0", "/no/such/thing -x")
    assert len(os.listdir("/proc/self/fd")) == before
