"""Whole prefill and decode steps of a model, compiled for TPUs that are not there: docs/kernels-engine.md.

`python benchmarks/steps_ahead.py llama3-8b v6e:2x2 [--layers 2] --out FOLDER`. Needs the extra `aot-tpu`. Nothing is
timed: what comes out is what the compiler says of memory, and the collectives of the program. Figures go to
FOLDER/steps_ahead.json after each step, the table to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from simulator import positive
from tables import table

from mcjax.backends.jax.ahead import StepReport, compile_step
from mcjax.backends.jax.placement import Place
from mcjax.backends.jax.programs import Geometry
from mcjax.cost import catalogue
from mcjax.errors import UserError
from mcjax.kernels.choice import KernelChoice
from mcjax.kernels.proof.tpu import tpu_mesh, tpu_topology

PALLAS = KernelChoice("pallas", "pallas", "pallas", "heads_first")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name of conf/model, such as llama3-70b")
    parser.add_argument("topology", help="such as v6e:4x4")
    parser.add_argument("--layers", type=positive, help="so many only (default: all)")
    parser.add_argument("--pages", type=positive, default=1024)
    parser.add_argument("--page-tokens", type=positive, default=128)
    parser.add_argument("--context-tokens", type=positive, default=8192)
    parser.add_argument("--batch", type=positive, default=64, help="rows of the decode step")
    parser.add_argument("--chunk-tokens", type=positive, default=2048, help="of the prefill step")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        print(_steps(options))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _steps(options: argparse.Namespace) -> str:
    shape = catalogue.model(options.model)
    shape = replace(shape, layers=options.layers or shape.layers)
    mesh = tpu_mesh(options.topology, (len(tpu_topology(options.topology).devices),), ("chip",))
    place = Place(tuple(mesh.devices.flat))
    geometry = Geometry(
        pages=options.pages,
        page_tokens=options.page_tokens,
        max_batch=options.batch,
        chunk_tokens=options.chunk_tokens,
        max_context_tokens=options.context_tokens,
    )
    file = options.out / "steps_ahead.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    reports: list[tuple[str, StepReport]] = []
    for phase, rows, width in (("decode", options.batch, 1), ("prefill", 1, options.chunk_tokens)):
        name = f"{phase} of {rows} x {width}"
        print(f"{options.model}, {shape.layers} layers on {options.topology}: {name}", file=sys.stderr)
        report = compile_step(shape, geometry, place, rows, width, PALLAS)
        reports.append((name, report))
        results[f"{options.model}/{shape.layers}/{options.topology}/{name}"] = {
            **asdict(report),
            "hbm_bytes": report.hbm_bytes,
            "jax": metadata.version("jax"),
            "libtpu": metadata.version("libtpu"),
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(results, indent=2) + "\n")
    head = ("step", "arguments, B", "temporaries, B", "code, B", "in all, GiB", "collectives", "their results, B")
    return table(head, [(name, *_columns(report)) for name, report in reports])


def _columns(report: StepReport) -> tuple[str, ...]:
    sizes = (f"{size:,}" for size in (report.argument_bytes, report.temp_bytes, report.code_bytes))
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(report.collectives.items()))
    moved = ", ".join(f"{nbytes:,}" for _, nbytes in sorted(report.collective_bytes.items()))
    return (*sizes, f"{report.hbm_bytes / 2**30:.2f}", counts, moved)


if __name__ == "__main__":
    sys.exit(main())
