"""`mcjax pool inspect|verify DIR`: an SSD tier looked at from outside; nothing is changed, a run may be using it.

DIR is what `kvpool.ssd_path` names, or one node's folder below it. `inspect` reads the headers: blocks, the prefix
tree, namespaces and tenants, damage. `verify` reads every block and compares its checksum.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mcjax.app.pool.folders import folders
from mcjax.app.pool.inspect import inspected
from mcjax.app.pool.verify import Verified, verified
from mcjax.errors import McjaxError


def command(arguments: Sequence[str]) -> int:
    """Exit status 0; 1 if `verify` found damage; 2 for a directory that cannot be read."""
    parser = argparse.ArgumentParser(
        "mcjax pool", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("inspect", "verify"))
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--json", action="store_true", help="every figure as JSON, on standard output")
    parser.add_argument(
        "--tenant",
        action="append",
        default=[],
        metavar="NAME",
        help="inspect: a tenant who may be there; those of MCJAX_TENANT_SALTS_FILE are known",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    try:
        return (_inspect if options.what == "inspect" else _verify)(options)
    except (McjaxError, OSError) as problem:
        if options.debug:
            raise
        print(f"mcjax: {problem}", file=sys.stderr)
        return 2


def _inspect(options: argparse.Namespace) -> int:
    found = inspected(options.directory, options.tenant)
    if options.json:
        print(json.dumps([one.values() for one in found], indent=1))
    else:
        print("\n\n".join(one.text() for one in found))
    return 0


def _verify(options: argparse.Namespace) -> int:
    found = _with_progress(folders(options.directory))
    if options.json:
        print(json.dumps([one.values() for one in found], indent=1))
    else:
        print("\n".join(one.text() for one in found))
    return 1 if any(one.damaged for one in found) else 0


def _with_progress(paths: Sequence[Path]) -> list[Verified]:
    """Verify each folder, with a bar on standard error where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:

        def one(path: Path) -> Verified:
            task = bar.add_task(f"reading {path.name}", total=None)
            return verified(path, lambda done, total: bar.update(task, completed=done, total=total))

        return [one(path) for path in paths]
