"""`mcjax workload NAME_OR_PATH [key=value ...]`: what a workload is made of, and how much hardware it keeps busy.

NAME is an option of the group `workload`; a path is a trace file, whose format its first line tells, or a folder of
ServeGen clients or of Weka conversations. `hardware=`, `model=` and `cost=` say of what the load is reckoned, as for a
run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, cast

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from mcjax.app.build import DEFAULT_BLOCK_TOKENS, strategy_of, workload_of
from mcjax.app.command import MISTAKE, explain
from mcjax.app.compose import compose, made
from mcjax.app.mistakes import close_to
from mcjax.app.plugins import Plugins
from mcjax.errors import ConfigError, TraceError, UserError
from mcjax.workload import azure, burstgpt
from mcjax.workload.base import Workload
from mcjax.workload.files import find

CSV_FORMATS = {"azure": azure.COLUMNS, "burstgpt": burstgpt.COLUMNS}
"""Columns that tell one CSV format from the others."""
JSON_FORMATS = {
    "weka": ("requests", "block_size"),
    "bailian": ("hash_ids", "chat_id"),
    "aiperf": ("session_id", "input_length"),
    "mooncake": ("hash_ids", "timestamp"),
    "jsonl": ("arrival_s",),
}
"""Fields likewise; the first format whose fields are all there."""
FIRST_LINE_BYTES = 1 << 28
"""Of a conversation with all its block ids, a line can be long."""


def command(arguments: Sequence[str]) -> int:
    """Prints the report and draws workload.png. Exit status 0, or 2 for a workload that cannot be had."""
    parser = argparse.ArgumentParser(
        "mcjax workload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", metavar="NAME_OR_PATH", help="an option of workload=, or a trace")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for a run: workload.limit=1000 model=...")
    parser.add_argument("--plot", metavar="FILE", default="workload.png", help="where the picture goes")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = compose([*choice(options.workload), *options.overrides])
        rows, figure = report_of(config)
        _save(figure, options.plot)
    except (UserError, HydraException, OmegaConfBaseException) as problem:
        if options.debug:
            raise
        print(f"mcjax: {explain(problem)}", file=sys.stderr)
        return MISTAKE
    _show(rows)
    print(f"picture: {options.plot}")
    return 0


def report_of(config: DictConfig) -> tuple[Sequence[tuple[str, str]], Any]:
    """(name, text) lines and the `matplotlib.figure.Figure` of a composed config's workload."""
    from mcjax.workload.analysis import report

    model, hardware = made(config, "model"), made(config, "hardware")
    cost = strategy_of("cost", config, Plugins({}))
    if hasattr(cost, "check"):
        cost.check(hardware.name, model.name)
    workload = cast("Workload", workload_of(config))
    block_tokens = config.kvpool.block_tokens or workload.block_tokens or DEFAULT_BLOCK_TOKENS  # as a run has it
    rows, figure = report(workload, cost, block_tokens)
    return [*rows, ("an instance is", f"{model.name} on {hardware.name}; model= and hardware= choose another")], figure


def choice(word: str) -> list[str]:
    """The overrides that pick a workload. Raises `ConfigError` for a word that is neither an option nor a trace."""
    folder = resources.files("mcjax.conf").joinpath("workload")
    names = sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    if word in names:
        return [f"workload={word}"]
    if "/" not in word and "." not in word and not Path(word).exists():
        raise ConfigError("workload", word, f"neither an option nor a file{close_to(word, names)}", names)
    source = "Or one of: " + ", ".join(names)
    path = find(word, source, folder=None)
    return [f"workload={format_of(path)}", f"workload.path='{_quoted(path)}'"]


def format_of(path: Path) -> str:
    """Which option reads this trace. Raises `ConfigError` if none knows its first line, or what a folder holds."""
    if path.is_dir():
        if any(path.glob("chunk-*-trace.csv")):
            return "servegen"
        if any(path.glob("*.json")):
            return "weka"
        problem = "holds neither ServeGen clients (chunk-N-trace.csv) nor Weka conversations (.json)"
        raise ConfigError("workload", path, problem)
    if path.suffix == ".json":
        return "weka"
    try:
        with path.open("rb") as file:
            lines = enumerate(iter(lambda: file.readline(FIRST_LINE_BYTES), b""), start=1)
            number, line = next((entry for entry in lines if entry[1].strip()), (0, b""))
    except OSError as problem:
        raise ConfigError("workload", path, f"cannot be read: {problem.strerror}") from problem
    if not line:
        raise ConfigError("workload", path, "is empty: a trace has a request a line")
    text = line.decode("utf-8-sig", errors="replace").strip()
    if text.startswith("{"):
        fields, formats = _fields(text), JSON_FORMATS
    else:
        fields, formats = {name.strip() for name in text.split(",")}, CSV_FORMATS
    for name, needed in formats.items():
        if fields.issuperset(needed):
            return name
    like, needed = max(reversed(formats.items()), key=lambda entry: len(fields.intersection(entry[1])))
    missing = [name for name in needed if name not in fields]
    if len(missing) < len(needed):
        problem = f"is missing in the first line, which is most like workload={like}: that needs {', '.join(needed)}"
        raise TraceError(str(path), number, missing[0], problem)
    names = ", ".join({**CSV_FORMATS, **JSON_FORMATS})
    problem = f"its first line is of no known format ({names}); docs/workload.md says what each looks like"
    raise ConfigError("workload", path, problem)


def _fields(text: str) -> set[str]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return set()
    return set(cast("dict[str, Any]", parsed)) if isinstance(parsed, dict) else set()


def _quoted(path: Path) -> str:
    """Inside single quotes of Hydra's grammar."""
    return str(path).replace("\\", "\\\\").replace("'", "\\'")


def _save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as problem:
        raise ConfigError("--plot", path, f"cannot be written: {problem}") from problem


def _show(rows: Sequence[tuple[str, str]]) -> None:
    """A rich table on a terminal, aligned lines elsewhere."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in rows:
            table.add_row(Text(name), Text(text))
        Console().print(table)
        return
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:{width}}  {text}")
