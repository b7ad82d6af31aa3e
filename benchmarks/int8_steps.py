"""int8 weights beside plain ones: how long a decode step takes, what it holds, and how far the logits are off.

`python benchmarks/int8_steps.py [--model smollm2] [--batches 1 8] [--rounds 16] [--tokens 512] [--out FOLDER]`. Each
quantisation in each dtype; steps take turns, and the best and the median of each count. Bytes are those of the weights,
and the workspace of the larger decode step. Logits are those of a text (docstrings of Python's own library), each
token behind those before it, against the same dtype's plain weights: the relative norm of the difference, the share of
positions whose most likely token is the same, and the perplexity of the text.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from measure import machine, say
from simulator import positive
from tables import table

from mcjax.backends.jax.memory import array_bytes
from mcjax.backends.jax.programs import Geometry, Programs, pack_row
from mcjax.cost import catalogue as shapes
from mcjax.cost.model_shape import ModelShape
from mcjax.models import catalogue
from mcjax.models.tokenizer import tokenizer_for

PAGE_TOKENS = 16
CONTEXT_TOKENS = 128


def text() -> str:
    """English that ships with Python."""
    import argparse as a
    import asyncio as b
    import decimal as c
    import json as d
    import logging as e

    return "\n\n".join(filter(None, (module.__doc__ for module in (c, d, a, e, b))))


class Side:
    """One model's compiled steps."""

    def __init__(self, shape: ModelShape, batches: Sequence[int], context_tokens: int):
        most = max(batches)
        per_row = -(-max(context_tokens, CONTEXT_TOKENS + 64) // PAGE_TOKENS)
        self.geometry = Geometry(
            per_row * most, PAGE_TOKENS, most, 32, per_row * PAGE_TOKENS, batches=tuple(sorted(batches))
        )
        self.per_row = per_row
        programs = Programs(catalogue.load(shape, 0, self.geometry.max_context_tokens).model, self.geometry)
        self.here = programs.on(jax.local_devices()[0])
        self.pages: Any = programs.new_pages(jax.local_devices()[0])
        self.weight_bytes = array_bytes(self.here.weights)

    def row(self, width: int, start: int, tokens: Sequence[int], index: int = 0) -> np.ndarray:
        pages = list(range(index * self.per_row, (index + 1) * self.per_row))
        return pack_row(width, len(tokens), start, np.asarray(tokens, np.int32), pages, self.geometry)

    def call(self, rows: np.ndarray) -> Any:
        width = rows.shape[1] - 2 - self.geometry.table_width
        logits, self.pages = self.here.model(len(rows), width)(self.here.weights, self.pages, rows)
        return logits

    def decode(self, batch: int) -> Callable[[], None]:
        rows = np.stack([self.row(1, CONTEXT_TOKENS, [7], index) for index in range(batch)])
        return lambda: self.call(rows).block_until_ready()

    def workspace_bytes(self, batch: int) -> int:
        self.here.model(batch, 1)
        return self.here.compiled[f"model {batch}x1"].memory_analysis().temp_size_in_bytes

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        return np.stack([np.asarray(self.call(self.row(1, at, [token])[None])[0]) for at, token in enumerate(ids)])


def interleaved(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if number:  # the first warms up
                times[name].append(time.perf_counter() - began)
    return times


def perplexity(logits: np.ndarray, ids: Sequence[int]) -> float:
    wide = logits[:-1].astype(np.float64)
    peak = wide.max(axis=1)
    normal = np.log(np.exp(wide - peak[:, None]).sum(axis=1)) + peak
    return float(np.exp(np.mean(normal - wide[np.arange(len(ids) - 1), ids[1:]])))


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    plain = shapes.model(options.model)
    ids = tokenizer_for(plain).encode(text())[: options.tokens]
    sides: dict[str, Side] = {}
    for name, size in (("float32", 4), ("bfloat16", 2)):
        for kind in ("none", "int8"):
            say(f"loading {name}, {kind}")
            shape = replace(plain, dtype_bytes=size, kv_dtype_bytes=size, quantisation=kind)
            sides[f"{name} {kind}"] = Side(shape, options.batches, len(ids) + 1)
    rows: dict[str, dict[str, Any]] = {
        name: {
            "weights": name,
            "weight_bytes": side.weight_bytes,
            "workspace_bytes": max(map(side.workspace_bytes, options.batches)),
        }
        for name, side in sides.items()
    }
    for batch in options.batches:
        say(f"decode of {batch}")
        for name, times in interleaved({n: s.decode(batch) for n, s in sides.items()}, options.rounds).items():
            rows[name][f"best_s_{batch}"] = min(times)
            rows[name][f"median_s_{batch}"] = statistics.median(times)
    for dtype in ("float32", "bfloat16"):
        say(f"logits of {len(ids)} tokens, {dtype}")
        wanted = sides[f"{dtype} none"].logits(ids)
        for kind in ("none", "int8"):
            found = sides[f"{dtype} {kind}"].logits(ids)
            rows[f"{dtype} {kind}"] |= {
                "relative_norm": float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted)),
                "agreement": float((found.argmax(1) == wanted.argmax(1)).mean()),
                "perplexity": perplexity(found, ids),
            }
    return list(rows.values())


def shown(rows: list[dict[str, Any]], batches: Sequence[int]) -> str:
    head = ["weights", "weights MB", "workspace MB"]
    head += [f"decode of {batch}: best ms; median" for batch in batches]
    head += ["logits off by", "same choice", "perplexity"]
    return table(
        head,
        (
            [
                row["weights"],
                f"{row['weight_bytes'] / 1e6:.1f}",
                f"{row['workspace_bytes'] / 1e6:.1f}",
                *(f"{row[f'best_s_{b}'] * 1e3:.1f}; {row[f'median_s_{b}'] * 1e3:.1f}" for b in batches),
                f"{row['relative_norm']:.2g}",
                f"{row['agreement']:.1%}",
                f"{row['perplexity']:.2f}",
            ]
            for row in rows
        ),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=positive, default=16)
    parser.add_argument("--tokens", type=positive, default=512)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    rows = measure(options)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        command = shlex.join(["python", "benchmarks/int8_steps.py", *(arguments or sys.argv[1:])])
        written = json.dumps({"command": command, "machine": machine(), "rows": rows}, indent=1)
        (options.out / "int8_steps.json").write_text(written, encoding="utf-8")
    print(shown(rows, options.batches), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
