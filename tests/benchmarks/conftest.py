"""What the benchmarks' tests share: the script, its modules, and small traces in the public formats."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

Benchmark = Callable[..., tuple[dict[str, Any], subprocess.CompletedProcess[str]]]
"""Runs the script with these arguments: what is in results.json, and the process."""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module that lies beside the script."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def small_traces(tmp_path: Path) -> Path:
    """A folder with 40 conversations' requests and 300 arrivals, under the public files' names."""
    folder = tmp_path / "traces"
    folder.mkdir()
    draw = random.Random(0)
    with (folder / "conversation_trace.jsonl").open("w") as file:
        for index in range(40):
            blocks = draw.randint(1, 12)
            ids = [0, *range(1 + index * 20, index * 20 + blocks)]
            row = {"timestamp": 3000 * index, "input_length": 512 * blocks - 9, "output_length": 20, "hash_ids": ids}
            file.write(json.dumps(row) + "\n")
    with (folder / "azure_llm_2023_conv.csv").open("w") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        for index in range(300):
            lengths = f"{draw.randint(50, 3000)},{draw.randint(1, 80)}"
            file.write(f"2023-11-16 18:{index // 10:02d}:{index % 10 * 6:02d}.5000000,{lengths}\n")
    return folder


@pytest.fixture
def benchmark_run(small_traces: Path, tmp_path: Path) -> Benchmark:
    def run(*arguments: str, traces: Path = small_traces) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
        out = tmp_path / "out"
        command = [sys.executable, str(BENCHMARKS / "simulator.py"), *arguments, "--out", str(out)]
        environment = {**os.environ, "MCJAX_TRACES": str(traces)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        results = json.loads((out / "results.json").read_text()) if (out / "results.json").exists() else {}
        return results, done

    return run
