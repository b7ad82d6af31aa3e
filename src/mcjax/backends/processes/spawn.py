"""Worker processes as the controller starts and ends them."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from mcjax.errors import ConfigError

MODULE = "mcjax.backends.processes.worker"
KILLED_S = 5.0
"""How long the system may take to end what was killed, and its last output to arrive."""
KEPT_LINES = 20
"""Of what a process printed, so many last lines are told when it dies."""


class WorkerProcess:
    """In a session of its own: a Ctrl-C of the terminal reaches only the controller, which ends it as it sees fit.

    `prefix` is put before the command line (`ip netns exec a`, `taskset -c 1`). What the process prints goes to this
    one's standard error, with its name in front.
    """

    def __init__(
        self, name: str, prefix: str = "", environment: Mapping[str, str] | None = None, place: str | None = None
    ):
        """Raises `ConfigError` for a prefix that cannot be run; `place`: the name that the config has it by."""
        self.name = name
        self.socket, theirs = socket.socketpair()
        # -P: the working directory is no better than any other path.
        command = [*shlex.split(prefix), sys.executable, "-u", "-P", "-m", MODULE, str(theirs.fileno())]
        try:
            with _interrupts_held_back():
                # Started by the thread that plays the run, not by one that ends before: its end is what they heed.
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=dict(os.environ if environment is None else environment),
                )
        except OSError as problem:
            self.socket.close()
            raise ConfigError(f"launcher.command.{place or name}", prefix, f"cannot be run: {problem}") from None
        finally:
            theirs.close()
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._pump = threading.Thread(target=self._pass_on, name=f"mcjax-output-{name}", daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """And whatever it has started. Works on one that stands still, too."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self, patience_s: float) -> None:
        """Wait until it has ended by itself, no longer than that; then kill it. Leaves no process and no thread, unless
        the system itself cannot end it."""
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_S)
        self._pump.join(KILLED_S)

    def death(self, patience_s: float = 5.0) -> str:
        """How it ended, with what it printed last. For one that has ended, or is about to."""
        self.end(patience_s)
        status = self._process.returncode
        if status is None:
            return "killed, but the system has not ended it yet"
        how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return "\n".join([how, *self._last_lines])

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                text = line.decode(errors="replace").rstrip()
                self._last_lines.append(text)
                with contextlib.suppress(OSError, ValueError):  # nobody has to be listening
                    print(f"[{self.name}] {text}", file=sys.stderr, flush=True)


@contextmanager
def _interrupts_held_back() -> Generator[None, None, None]:
    """A process started here begins with SIGINT blocked, and leaves it so: the controller ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
