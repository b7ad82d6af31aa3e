"""A process that shows one cell after another, so that a compiler that crashes takes nothing else with it.

Names of cells come in on standard input, one a line; a line of JSON goes out for each. What jax and the compilers print
goes to standard error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from types import TracebackType
from typing import Any

from mcjax.kernels.proof.cells import Cell
from mcjax.kernels.proof.show import Outcome, show

CELLS_EACH = 50
"""After so many cells a process is replaced: compiled programs stay in its memory."""


class Worker:
    """Shows cells in a child process, which is started when it is needed and again after it died or was overdue."""

    def __init__(self, cell_seconds: float, module: str = "mcjax.kernels.proof.worker"):
        """`module`: what the child runs as its main one."""
        self._cell_seconds = cell_seconds
        self._command = [sys.executable, "-m", module]
        self._process: subprocess.Popen[str] | None = None
        self._shown = 0
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed at exit)

    def show(self, cell: Cell) -> tuple[Outcome, float]:
        """What came of the cell, and the seconds that it took."""
        if self._process is None or self._shown >= CELLS_EACH:
            self._restart()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        began = time.perf_counter()
        overdue = threading.Event()

        def give_up() -> None:
            overdue.set()
            process.kill()

        timer = threading.Timer(self._cell_seconds, give_up)
        timer.start()
        try:
            process.stdin.write(cell.name + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        seconds = time.perf_counter() - began
        self._shown += 1
        if line:
            return Outcome(**json.loads(line)), seconds
        status = process.wait()
        self._process = None
        if overdue.is_set():
            return Outcome("overdue", f"not done after {self._cell_seconds:g} s"), seconds
        return Outcome("crashed", f"the process ended with status {status}: {self._last_words()}"), seconds

    def _restart(self) -> None:
        self.close()
        self._said.seek(0)
        self._said.truncate()
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            encoding="utf-8",
            env=environment,
        )
        self._shown = 0

    def _last_words(self) -> str:
        """What the process said last, for the table."""
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().splitlines() if line.strip()]
        return " | ".join(lines[-3:])[:400]

    def close(self) -> None:
        """Ends the process. May be called again, and `show` after it."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()
        self._said.close()


def main() -> None:
    """The child's side."""
    # Whatever writes to standard output, Python's or a compiler's, must not come between the lines of JSON.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        outcome: dict[str, Any] = asdict(show(Cell.of(line.strip())))
        answers.write(json.dumps(outcome) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
