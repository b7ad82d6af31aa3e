"""`mcjax config [WORD ...]`: what a config may say: groups, options, keys with their defaults, one line each.

A word is a group (`sched/prefill`), an option (`workload=synthetic`), `root` for the keys beside the groups, or one of
the sections there (`engine`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mcjax.app.reference import ROOT_WORD, Part, chosen, everything, overview
from mcjax.errors import ConfigError, McjaxError

HINT = f"`mcjax config GROUP` shows the keys of a group, `mcjax config {ROOT_WORD}` those beside the groups."

PAGE = """\
# Config reference

Every group, option and key of a run's config, as `src/mcjax/conf` and the code declare them. This page is written by

```
mcjax config --markdown docs/config.md
```

and `mcjax config [GROUP | GROUP=OPTION | root]` shows the same in a terminal. How overrides are written is in
[app.md](app.md). A key that takes a word, a number or null is refused anything else before a run begins.

"""


def command(arguments: Sequence[str]) -> int:
    """Exit status 0, or 2 for a word that names nothing."""
    parser = argparse.ArgumentParser(
        "mcjax config", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="a group, an option, root, or a section of it")
    parser.add_argument("--markdown", metavar="FILE", help="write the whole reference as a page")
    options = parser.parse_args(arguments)
    try:
        if options.markdown:
            _write(options.markdown)
            print(options.markdown)
            return 0
        parts = [part for word in options.words for part in chosen(word)] if options.words else overview()
    except McjaxError as problem:
        print(f"mcjax: {problem}", file=sys.stderr)
        return 2
    hint = "" if options.words else HINT
    if sys.stdout.isatty():
        _show(parts, hint)
    else:
        print(plain(parts, hint), end="")
    return 0


def plain(parts: Iterable[Part], hint: str = "") -> str:
    """Lines of text: each part's title, then its table, its columns aligned."""
    lines: list[str] = []
    for part in parts:
        lines += [f"{part.title}: {part.about}" if part.about else part.title]
        columns = [column for column in zip(*part.rows, strict=True) if any(column)]
        widths = [max(map(len, column)) for column in columns]
        for row in zip(*columns, strict=True):
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  " + "  ".join(cells).rstrip())
        lines.append("")
    return "\n".join([*lines, f"{hint}\n" if hint else ""]).rstrip("\n") + "\n"


def markdown(parts: Iterable[Part]) -> str:
    """The page of the whole reference."""
    lines: list[str] = []
    for part in parts:
        level = "###" if "=" in part.title else "##"
        lines += [f"{level} {part.title}", "", part.about, ""] if part.about else [f"{level} {part.title}", ""]
        if part.rows:
            lines += [_line(part.heads), _line(["---"] * len(part.heads))]
            lines += [_line([*_code(row[: _coded(part)]), *row[_coded(part) :]]) for row in part.rows]
            lines.append("")
    return PAGE + "\n".join(lines)


def _coded(part: Part) -> int:
    """How many of a table's first columns are written as code: the name of an option; a key and its default."""
    return 1 if "option" in part.heads else 2


def _code(cells: Sequence[str]) -> list[str]:
    return [f"`{cell}`" if cell else "" for cell in cells]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _write(path: str) -> None:
    """Raises `ConfigError` for a file that cannot be written."""
    try:
        Path(path).write_text(markdown(everything()), encoding="utf-8")
    except OSError as problem:
        raise ConfigError("--markdown", path, f"cannot be written: {problem.strerror}") from problem


def _show(parts: Iterable[Part], hint: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    screen = Console()
    for part in parts:
        screen.print(Text.assemble((part.title, "bold"), f"  {part.about}"))
        if part.rows:
            table: Any = Table(box=None, padding=(0, 2, 0, 0), show_header="key" in part.heads, header_style="dim")
            for number, head in enumerate(part.heads):
                table.add_column(head, style="cyan" if number == 0 else None, overflow="fold")
            for row in part.rows:
                table.add_row(*[Text(cell) for cell in row])
            screen.print(table)
        screen.print()
    if hint:
        screen.print(Text(hint))
