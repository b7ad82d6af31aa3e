"""NVIDIA's DynoSim, where somebody has installed it: `dynamo.replay` in an interpreter of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import measured

REPLAY = Path(__file__).with_name("dynosim_replay.py")
REAL_TIME = ("wall_time_ms", "processed_tokens_per_s", "processed_output_tokens_per_s")
"""Figures of its report that are about the machine it ran on, not about what it simulated."""


def missing(python: str | None) -> str:
    """Why it cannot be measured; empty if it can."""
    if not python:
        return "no --dynosim-python given (docs/benchmarks.md says how to install it)"
    try:
        done = subprocess.run([python, "-c", "import dynamo.replay"], capture_output=True, text=True, check=False)
    except OSError as problem:
        return f"--dynosim-python {Path(python).name}: {problem.strerror}"
    if done.returncode:
        return f"--dynosim-python cannot import dynamo.replay: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
    return ""


def replay(folder: Path, python: str, trace: str, turn: int) -> dict[str, Any]:
    """Replay a Mooncake file in `folder` on 8 prefill and 8 decode workers behind its KV router, all else default."""
    target = f"dynosim-{turn}.json"
    usage = measured(
        [str(Path(python).absolute()), str(REPLAY), trace, target],
        folder,
        folder / "logs" / f"dynosim-{turn}.log",
        f"python benchmarks/dynosim_replay.py {trace} {target}",
    )
    report = json.loads((folder / target).read_text())
    return {**usage.row(), "version": report["version"], "report": report["summary"]}


def differences(reports: Sequence[dict[str, Any]]) -> list[str]:
    """Figures that are not the same in all reports, real time left out: empty if it is deterministic."""
    names = sorted({name for report in reports for name in report} - set(REAL_TIME))
    return [name for name in names if any(report.get(name) != reports[0].get(name) for report in reports)]
