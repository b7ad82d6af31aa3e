"""Both sides of each system in `transfer.py` as processes, of which only those whose turn it is run at all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measure import BenchmarkError
from transfer_systems import SYSTEMS

PATIENCE_S = 120.0
WORKER = Path(__file__).with_name("transfer_worker.py")


class Memory:
    """Two memory files that never get shorter: what is read, filled with random bytes, and where it has to land."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.source, self.target = _file("source", nbytes), _file("target", nbytes)
        with mmap.mmap(self.source, nbytes) as memory:
            draw = np.random.default_rng(0)
            for start in range(0, nbytes, 1 << 24):
                part = draw.integers(0, 256, min(1 << 24, nbytes - start), np.uint8)
                memory[start : start + len(part)] = part.tobytes()

    def close(self) -> None:
        os.close(self.source)
        os.close(self.target)


def _file(name: str, nbytes: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


class Process:
    """A worker. `ask` returns its answer; raises `BenchmarkError` for one that fails, is gone, or does not answer."""

    def __init__(self, system: str, role: str, memory: Memory, log: Path):
        self.name = f"{system} ({role})"
        self._log = log
        command = [sys.executable, str(WORKER), system, role, str(memory.source), str(memory.target)]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, str(memory.nbytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                pass_fds=(memory.source, memory.target),
            )
        self._read = bytearray()
        self.pid = int(self._answer())

    def ask(self, what: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise BenchmarkError(f"{self.name} is gone: see {self._log}") from None
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        while b"\n" not in self._read:
            if not select.select([self._process.stdout], [], [], PATIENCE_S)[0]:
                self.kill()
                raise BenchmarkError(f"{self.name} does not answer")
            got = os.read(self._process.stdout.fileno(), 1 << 16)
            if not got:
                raise BenchmarkError(f"{self.name} is gone: see {self._log}")
            self._read += got
        line, _, self._read = self._read.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchmarkError(f"{self.name}: {answer['error']}")
        return answer["answer"]

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGCONT)
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.send(signal.SIGCONT)
        try:
            self.ask("close")
            self._process.wait(10)
        except (BenchmarkError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Pair:
    """A system's reader, and its peer where it has one. Both stand still except inside `turn`."""

    def __init__(self, system: str, memory: Memory, logs: Path):
        self.system = system
        self.kind = SYSTEMS[system]
        log = logs / f"{system.replace(' ', '_').replace(',', '')}.log"
        with contextlib.ExitStack() as undo:
            self.reader = Process(system, "reader", memory, log)
            undo.callback(self.reader.kill)
            self.peer: Process | None = None
            if self.kind.peer:
                self.peer = Process(system, "peer", memory, log)
                undo.callback(self.peer.kill)
                self.reader.ask("connect", description=self.peer.ask("describe"), pid=self.peer.pid)
            undo.pop_all()
        self._stand(signal.SIGSTOP)

    @contextlib.contextmanager
    def turn(self) -> Iterator[Process]:
        self._stand(signal.SIGCONT)
        try:
            yield self.reader
        finally:
            self._stand(signal.SIGSTOP)

    def _stand(self, number: signal.Signals) -> None:
        for process in (self.reader, self.peer):
            if process is not None:
                process.send(number)

    def close(self) -> None:
        self._stand(signal.SIGCONT)
        self.reader.close()
        if self.peer is not None:
            self.peer.close()


@contextlib.contextmanager
def pairs(systems: list[str], memory: Memory, logs: Path) -> Iterator[tuple[dict[str, Pair], dict[str, str]]]:
    """A pair of each system that can be here, and why the others cannot."""
    found: dict[str, Pair] = {}
    missing: dict[str, str] = {}
    try:
        for system in systems:
            try:
                found[system] = Pair(system, memory, logs)
            except BenchmarkError as problem:
                missing[system] = str(problem)
        yield found, missing
    finally:
        for pair in found.values():
            pair.close()
