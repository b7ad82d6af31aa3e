"""`mcjax kernels model=... hardware=...`: each attention kernel's limit, what binds it, and what was achieved.

Of one device: `hardware.count` of them share the model's heads. Sizes are keys: context_tokens=8192 batch=32
page_tokens=64 chunk_tokens=2048 query_tokens=1 kv_dtype=int8 block_dtype=bfloat16 window=4096 soft_cap=true.
Prefill is of the last chunk_tokens of one context (all of it by default), decode is a step of `batch` contexts, packing
takes one context's pages of all layers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from mcjax.app.command import MISTAKE, explain
from mcjax.app.compose import compose, made
from mcjax.app.kernels.plot import roofline
from mcjax.app.kernels.rows import HEADER, Row, facts, rows_of
from mcjax.app.kernels.sizes import cases_of, keys_of
from mcjax.cost.hardware import Hardware
from mcjax.cost.kernel_timings import KernelTimings, read
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError, UserError


def command(arguments: Sequence[str]) -> int:
    """Exit status 0, or 2 for sizes, a model or a file that cannot be used."""
    parser = argparse.ArgumentParser(
        "mcjax kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="model=, hardware=, and sizes")
    parser.add_argument("--measured", metavar="FILE", help="results.json of benchmarks/gpu_kernels.py")
    parser.add_argument("--json", action="store_true", help="every figure as JSON, on standard output")
    parser.add_argument("--plot", metavar="FILE", help="draw the roofline with the kernels under it")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_intermixed_args(arguments)
    try:
        _show(options)
    except (UserError, HydraException, OmegaConfBaseException) as problem:
        if options.debug:
            raise
        print(f"mcjax: {explain(problem)}", file=sys.stderr)
        return MISTAKE
    return 0


def _show(options: argparse.Namespace) -> None:
    sizes, chosen = keys_of(options.words)
    config = compose(chosen)
    model, hardware = cast("ModelShape", made(config, "model")), cast("Hardware", made(config, "hardware"))
    measured = _measured(options.measured, hardware)
    cases = cases_of(model, hardware, sizes)
    rows = rows_of(model, hardware, cases, measured)
    if options.plot:
        _save(roofline(rows, hardware, f"{model.name} on {hardware.name}"), options.plot)
    about = facts(model, hardware, cases, measured)
    if options.json:
        values = {"model": model.name, "hardware": asdict(hardware), "kernels": [row.values() for row in rows]}
        print(json.dumps(values, indent=1))
        return
    print(about)
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(table_of(rows))
    else:
        print("\n".join(plain(rows)))
    if options.plot:
        print(f"picture: {options.plot}")


def _measured(path: str | None, hardware: Hardware) -> KernelTimings | None:
    if path is None:
        return None
    found = read(path, "--measured")
    if found.accelerator != hardware.accelerator:
        problem = f"was measured on {found.accelerator}, and hardware={hardware.name} is {hardware.accelerator}"
        raise ConfigError("--measured", path, problem)
    return found


def _save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as problem:
        raise ConfigError("--plot", path, f"cannot be written: {problem}") from problem


def table_of(rows: Sequence[Row]) -> Any:
    """A `rich.table.Table`."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in HEADER:
        words = name in ("kernel", "sizes", "bound by", "achieved")
        table.add_column(name, justify="left" if words else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row.cells()))
    return table


def plain(rows: Sequence[Row]) -> list[str]:
    """Aligned lines."""
    cells = [HEADER, *(tuple(cell.replace("\n", "; ") for cell in row.cells()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
