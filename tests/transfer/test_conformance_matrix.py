"""What each kind of endpoint says it can is listed in `docs/transfer-capabilities.md`, and the suite holds it to that.

`python tests/transfer/test_conformance_matrix.py` writes the table anew, also of kinds that cannot be here.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from dataclasses import fields
from pathlib import Path

from endpoint_kinds import KINDS

from mcjax.transfer.transports.endpoint import Capabilities

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transfer-capabilities.md"

HEAD = """# What each way to move bytes can do

Declared by each `Endpoint` (`capabilities`), held against the config at start, and tested: the conformance suite
(`tests/transfer/test_conformance*.py`) runs all of its tests on every kind that can be here, and skips one only by
what is declared here. Written by `python tests/transfer/test_conformance_matrix.py`.
"""

UNSAID = {
    "read": "Brings a peer's bytes here.",
    "write": "Brings bytes to a peer.",
    "other_host": "Leads to other machines.",
    "largest_span_bytes": "Of one span.",
}


def meanings() -> dict[str, str]:
    """What follows each field of `Capabilities` in its source."""
    body = ast.parse(inspect.getsource(Capabilities)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = dict(UNSAID)
    for field, text in itertools.pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def shown(value: bool | int) -> str:
    if isinstance(value, bool):
        return "yes" if value else "-"
    exponent = value.bit_length() - 1
    return f"2^{exponent}" if value == 1 << exponent else str(value)


def table() -> str:
    """The page, a column a kind."""
    explained, columns = meanings(), {name: kind.capabilities for name, kind in sorted(KINDS.items())}
    rows = [f"| | {' | '.join(f'`{name}`' for name in columns)} | |", f"|---|{'---|' * len(columns)}---|"]
    for field in fields(Capabilities):
        values = [shown(getattr(capabilities, field.name)) for capabilities in columns.values()]
        rows.append(f"| `{field.name}` | {' | '.join(values)} | {explained[field.name]} |")
    return HEAD + "\n" + "\n".join(rows) + "\n"


def test_the_page_lists_what_is_declared() -> None:
    assert PAGE.read_text(encoding="utf-8") == table(), f"python {Path(__file__).name} writes it anew"


def test_every_capability_is_explained() -> None:
    assert set(meanings()) == {field.name for field in fields(Capabilities)}


if __name__ == "__main__":
    PAGE.write_text(table(), encoding="utf-8")
