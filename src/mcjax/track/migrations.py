"""Runs of earlier schema versions, read as runs of today's: a step from each version to the next.

Version 2 defined the digest anew; the columns stayed. Version 3 added `requests.finish_reason`, version 4 hits by tier
and misses by cause. So digests of different versions say nothing about each other: that of an older run is left out of
its summary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mcjax.errors import RunError
from mcjax.track.arrow import Table, arrow
from mcjax.track.schemas import SCHEMA_VERSION, SCHEMAS
from mcjax.types import Miss

Step = Callable[[str, Table], Table]
"""Takes the name of a table and rows of it (all, or a piece: each row stands for itself) one version further."""

HITS = {"hbm_tokens": 0, "ssd_tokens": 0}
"""Of version 4: there were no such tiers before, and so no hits in them."""
MISSES = ("available_tokens", "routed_tokens", *(f"missed_{cause}_tokens" for cause in Miss))
"""Of version 4: nobody knows any more."""

ADDED: Mapping[int, Mapping[str, tuple[str, ...]]] = {
    3: {"requests": ("finish_reason",)},
    4: {"requests": (*HITS, *MISSES, "skip_reason")},
}
"""The columns that came with a version, by table."""


def _to_2(name: str, table: Table) -> Table:
    return table


def _to_3(name: str, table: Table) -> Table:
    if name != "requests":
        return table
    unknown = arrow().array([""] * table.num_rows, arrow().string())
    return table.add_column(table.schema.get_field_index("output_tokens") + 1, "finish_reason", unknown)


def _to_4(name: str, table: Table) -> Table:
    if name != "requests":
        return table
    pa, rows = arrow(), table.num_rows
    columns = {name: table.column(name) for name in table.schema.names}
    columns |= {name: pa.array([hits] * rows, pa.int64()) for name, hits in HITS.items()}
    columns |= {name: pa.nulls(rows, pa.int64()) for name in MISSES}
    columns["skip_reason"] = pa.array([""] * rows, pa.string())
    known = [name for name, _ in SCHEMAS["requests"] if name in columns]
    return pa.table({name: columns[name] for name in known})


STEPS: Mapping[int, Step] = {2: _to_2, 3: _to_3, 4: _to_4}
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
    today = dict(summary)
    if version < SCHEMA_VERSION:
        today["digest"] = ""
    if version < 4 and "tokens_by_tier" in today:
        tiers = today["tokens_by_tier"]
        today["tokens_by_tier"] = {"hbm": 0, **tiers, "ssd": 0}
        found = tiers["dram_local"] + tiers["dram_remote"]
        today["hit_tokens"] = {"available": None, "routed": None, "delivered": found}
        today["missed_tokens"] = dict.fromkeys(cause.value for cause in Miss)
        today["skipped_tokens"] = dict[str, int]()
    return today
