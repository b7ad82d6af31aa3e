"""From what tests measured to the table of docs/models-support.md.

A test tells the fixture `measured` what it found; with `MCJAX_SUPPORT=FILE` each is a line of JSON at that file's end.
`python tests/models/support_matrix.py FILE` sorts them into `support.jsonl`, and writes the page anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA = HERE / "support.jsonl"
PAGE = HERE.parents[1] / "docs" / "models-support.md"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
KEYS = ("case", "path", "mesh", "dtype", "against")
PATHS = ("random", "safetensors", "GGUF", "Orbax")


def read(path: Path) -> list[dict[str, Any]]:
    """One row for each thing measured, the last of it, sorted."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted({_key(line): line for line in lines}.values(), key=_key)


def _key(line: dict[str, Any]) -> tuple[str, ...]:
    return tuple(line[key] for key in KEYS)


def tables(lines: Iterable[dict[str, Any]]) -> str:
    """Markdown: a row a config and mesh, a column a way that weights come; and what was compared with torch running."""
    golden: dict[tuple[str, str], dict[str, float]] = {}
    live: dict[str, dict[str, float]] = {}
    for line in lines:
        if line["against"] == "golden":
            golden.setdefault((line["case"], line["mesh"]), {})[line["path"]] = line["error"]
        else:
            live.setdefault(line["case"], {})[line["dtype"]] = line["error"]
    meshes = ["one device", *sorted({mesh for _, mesh in golden} - {"one device"}, key=lambda mesh: (len(mesh), mesh))]
    rows = [
        [f"`{case}`" if mesh == meshes[0] else "", mesh, *(_shown(golden[case, mesh].get(path)) for path in PATHS)]
        for case in sorted({case for case, _ in golden})
        for mesh in meshes
        if (case, mesh) in golden
    ]
    text = _table(["config", "devices", *PATHS], rows)
    if live:
        columns = ["float32", "bfloat16"]
        shown = [[f"`{case}`", *(_shown(live[case].get(dtype)) for dtype in columns)] for case in sorted(live)]
        text += "\nWith transformers running beside:\n\n" + _table(["config", *columns], shown)
    return text


def _shown(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page(text: str, lines: Iterable[dict[str, Any]]) -> str:
    """The page's text, its tables those of `lines`."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{tables(lines)}\n{END}{after}"


def main() -> None:
    lines = read(Path(sys.argv[1]))
    DATA.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), lines), encoding="utf-8")


if __name__ == "__main__":
    main()
