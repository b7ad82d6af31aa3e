"""What a process costs: CPU seconds, wall seconds and peak memory of a child, as the kernel counts them."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REFERENCE_STEPS = 2_000_000


class BenchmarkError(Exception):
    """A part that cannot be measured, and why."""


@dataclass(frozen=True)
class Usage:
    """One child process from start to exit, imports included."""

    command: str
    user_s: float
    system_s: float
    wall_s: float
    peak_rss_bytes: int
    reference_s: float
    """CPU seconds of a fixed loop, mean of just before and just after: other load on a shared machine shows here."""

    @property
    def cpu_s(self) -> float:
        return self.user_s + self.system_s

    def row(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "cpu_s": self.cpu_s,
            "user_s": self.user_s,
            "system_s": self.system_s,
            "wall_s": self.wall_s,
            "peak_rss_bytes": self.peak_rss_bytes,
            "reference_s": self.reference_s,
        }


def measured(
    arguments: Sequence[str], folder: Path, log: Path, shown: str = "", variables: Mapping[str, str] | None = None
) -> Usage:
    """Run a child in `folder`, its output in `log`. `shown` is the command as a person would type it.

    Raises `BenchmarkError` with the end of its output if it fails.
    """
    shown = shown or shlex.join(arguments)
    say(f"  {shown}")
    log.parent.mkdir(parents=True, exist_ok=True)
    before_s = reference_s()
    start_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments, cwd=folder, env={**os.environ, **(variables or {})}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
    wall_s = time.monotonic() - start_s
    process.returncode = os.waitstatus_to_exitcode(status)  # it has been waited for here, not by subprocess
    if process.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        raise BenchmarkError(f"{shown}: exit status {process.returncode}\n{end}")
    unit = 1 if sys.platform == "darwin" else 1024
    usage = Usage(shown, used.ru_utime, used.ru_stime, wall_s, used.ru_maxrss * unit, (before_s + reference_s()) / 2)
    say(f"    {usage.cpu_s:.1f} s CPU, {wall_s:.1f} s wall, {usage.peak_rss_bytes / 1e6:,.0f} MB")
    return usage


def reference_s() -> float:
    """CPU seconds of a fixed loop of Python."""
    start_s = time.process_time()
    table: dict[int, int] = {}
    for step in range(REFERENCE_STEPS):
        table[step & 1023] = step
    return time.process_time() - start_s


def machine() -> dict[str, Any]:
    """What figures depend on, without names."""
    return {
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "revision": _git("describe", "--always", "--dirty"),
    }


def _git(*arguments: str) -> str:
    try:
        root = Path(__file__).resolve().parents[1]
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
