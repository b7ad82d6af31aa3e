"""A worker process as its parent sees it: started, given a point, heard, interrupted, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from typing import Any

from mcjax.app.sweep.messages import Job, receive, send

KEPT_LINES = 20
"""Of what a process printed, so many last lines are told when it dies."""
END_S = 5.0
CHUNK_BYTES = 1 << 16


class WorkerProcess:
    """In a session of its own: a Ctrl-C of the terminal reaches only the parent, which passes it on as it sees fit."""

    def __init__(self, environment: Mapping[str, str]):
        self.connection, theirs = Pipe()
        descriptor = theirs.fileno()
        with _interrupts_held_back():
            self._process = subprocess.Popen(
                # -u: what is printed is seen at once; -P: the working directory is no better than any other path.
                [sys.executable, "-u", "-P", "-m", "mcjax.app.sweep.worker", str(descriptor), str(os.getpid())],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(environment),
            )
        theirs.close()
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._unfinished = b""
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._deaf = False
        self.output_ended = False

    @property
    def output(self) -> int:
        """The descriptor of what it prints."""
        return self._output

    @property
    def ended(self) -> bool:
        """Whether no more is to come."""
        return self._deaf or self._process.poll() is not None

    def give(self, job: Job) -> None:
        """A process that is gone is found out by the next look."""
        self._last_lines.clear()
        with suppress(OSError):
            send(self.connection, job)

    def events(self) -> list[Any]:
        """What it has told since."""
        found: list[Any] = []
        try:
            while self.connection.poll(0):
                found.append(receive(self.connection))
        except (EOFError, OSError):
            self._deaf = True
        return found

    def lines(self, all_of_it: bool = False) -> list[str]:
        """The lines that it has printed since; with `all_of_it`, the unfinished last one too."""
        text = self._unfinished
        with suppress(BlockingIOError):
            while chunk := os.read(self._output, CHUNK_BYTES):
                text += chunk
            self.output_ended = True
        *lines, self._unfinished = text.split(b"\n")
        if all_of_it and self._unfinished:
            lines.append(self._unfinished)
            self._unfinished = b""
        told = [line.decode(errors="replace").rstrip("\r") for line in lines]
        self._last_lines.extend(told)
        return told

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """And whatever it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Closing the socket ends it: at once in the middle of a point, in an orderly way otherwise."""
        self.connection.close()
        self._status()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def death(self) -> str:
        """Why it is gone, with what it printed last."""
        status = self._status()
        if status < 0:
            name = signal.Signals(-status).name
            why = f"its process was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        else:
            why = f"its process ended by itself with status {status}"
        return "\n".join([why, *self._last_lines])

    def _status(self) -> int:
        """How it ended, once it has."""
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()


@contextmanager
def _interrupts_held_back() -> Generator[None, None, None]:
    """A process started here begins with SIGINT blocked: it lets it through when it can make something of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
