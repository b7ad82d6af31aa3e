"""Runs of earlier schema versions, read as runs of today's: a step from each version to the next.

Version 2 defined the digest anew; the columns stayed. Version 3 added `requests.finish_reason`. So digests of different
versions say nothing about each other: that of an older run is left out of its summary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mcjax.errors import RunError
from mcjax.track.arrow import Table, arrow
from mcjax.track.schemas import SCHEMA_VERSION, SCHEMAS

Step = Callable[[str, Table], Table]
"""Takes the name of a table and rows of it (all, or a piece: each row stands for itself) one version further."""

ADDED: Mapping[int, Mapping[str, tuple[str, ...]]] = {3: {"requests": ("finish_reason",)}}
"""The columns that came with a version, by table."""


def _to_2(name: str, table: Table) -> Table:
    return table


def _to_3(name: str, table: Table) -> Table:
    if name != "requests":
        return table
    unknown = arrow().array([""] * table.num_rows, arrow().string())
    return table.add_column(table.schema.get_field_index("output_tokens") + 1, "finish_reason", unknown)


STEPS: Mapping[int, Step] = {2: _to_2, 3: _to_3}
"""By the version that a step leads to."""


def check_version(found: object, what: str) -> int:
    """The version. Raises `RunError` for one that this mcjax cannot read."""
    text = str(found)
    if not text.isdigit() or int(text) not in (SCHEMA_VERSION, *(version - 1 for version in STEPS)):
        raise RunError(
            f"{what} has schema version {text}, this mcjax reads versions {min(STEPS) - 1} to {SCHEMA_VERSION}; "
            "read it with the mcjax that environment.json names"
        )
    return int(text)


def columns_at(version: int, name: str) -> list[str]:
    """The columns that a table had at a version."""
    later = {column for at, tables in ADDED.items() if at > version for column in tables.get(name, ())}
    return [column for column, _ in SCHEMAS[name] if column not in later]


def migrated(version: int, name: str, table: Table) -> Table:
    """Rows of a table of an earlier version, as today's."""
    for target in range(version + 1, SCHEMA_VERSION + 1):
        table = STEPS[target](name, table)
    return table


def migrated_summary(summary: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """A summary as today's. `schema` stays what the run was written with. Raises `RunError`."""
    version = check_version(summary["schema"], f"{directory}: summary.json")
    return {**summary, "digest": ""} if version < SCHEMA_VERSION else dict(summary)
