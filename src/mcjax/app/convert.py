"""`mcjax convert SRC DST`: a model's weights, shape and tokenizer in another form.

SRC is a GGUF file (a path, or package:NAME/FILE), a Hugging Face directory, a directory that Orbax wrote, or a name as
`model=` has it (`tiny`: the built-in weights). DST becomes a Hugging Face directory of safetensors, which transformers
loads, or one of Orbax, which is restored onto any mesh. One parameter is in memory at a time.

Until it is whole, DST is called DST.partial; the same command takes it up where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mcjax.cost import catalogue
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError, McjaxError
from mcjax.models.checkpoint_shape import shape_at

DTYPES = {"float32": 4, "bfloat16": 2}


def command(arguments: Sequence[str]) -> int:
    """Exit status 0; 1 for a disk that fails; 2 for what cannot be read, or is in the way."""
    parser = argparse.ArgumentParser(
        "mcjax convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("destination", type=Path, metavar="DST", help="the directory to write")
    parser.add_argument(
        "--to", choices=("safetensors", "orbax"), help="by default orbax, if DST ends so, else safetensors"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the weights; by default as in SRC (GGUF: bfloat16)")
    parser.add_argument("--shard-gb", type=float, default=5.0, metavar="GB", help="most of a safetensors file (5)")
    parser.add_argument("--seed", type=int, default=0, help="of built-in weights (0)")
    parser.add_argument("--no-tokenizer", action="store_true", help="weights and shape alone")
    parser.add_argument("--force", action="store_true", help="replace DST")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    try:
        _convert(options)
    except McjaxError as problem:
        if options.debug:
            raise
        print(f"mcjax: {problem}", file=sys.stderr)
        return 2
    except OSError as problem:
        if options.debug:
            raise
        print(f"mcjax: {problem}; the same command goes on from {options.destination}.partial", file=sys.stderr)
        return 1
    return 0


def _convert(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from mcjax.models.convert import Target, convert

    shape = shape_of(options.source, DTYPES.get(options.dtype))
    if not options.shard_gb > 0:
        raise ConfigError("shard-gb", options.shard_gb, "must be above 0")
    destination: Path = options.destination
    kind = options.to or ("orbax" if destination.name.endswith("orbax") else "safetensors")
    target = Target(destination, kind, int(options.shard_gb * 1e9), not options.no_tokenizer, options.force)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(f"writing {destination.name}", total=None)
        convert(shape, target, options.seed, lambda done, of: bar.update(task, completed=done, total=of))
    size = sum(file.stat().st_size for file in destination.rglob("*") if file.is_file())
    print(f"{destination}: {shape.parameters / 1e6:,.1f} million weights in {shape.dtype}, {size / 1e9:.3f} GB, {kind}")
    print(f"run it: mcjax model=hf model.path={destination} workload=text")


def shape_of(source: str, dtype_bytes: int | None) -> ModelShape:
    """Of what SRC names. Raises `ConfigError`."""
    by_name = [name for name in catalogue.names("model") if name not in ("gguf", "hf")]
    if source not in by_name or Path(source).exists():
        return shape_at(source, dtype_bytes)
    shape = catalogue.model(source)
    width = dtype_bytes or shape.dtype_bytes
    return replace(shape, dtype_bytes=width, kv_dtype_bytes=width)
