"""What the tables of a run look like: their columns, and the version that stands in their files."""

from __future__ import annotations

from typing import Any

from mcjax.track.arrow import arrow
from mcjax.types import Miss

SCHEMA_VERSION = 4
VERSION_KEY = b"mcjax_schema"

QUANTITIES = ("queue_s", "transfer_s", "prefill_s")
"""Candidate quantities with a column of their own; all others go to `others`, as JSON."""

Schema = tuple[tuple[str, str], ...]

SCHEMAS: dict[str, Schema] = {
    "requests": (
        ("request_id", "int"),
        ("arrival_ns", "int"),
        ("tenant", "text"),
        ("session", "text"),
        ("turn", "int"),
        ("parent", "int?"),
        ("priority", "int"),
        ("prompt_tokens", "int"),
        ("max_tokens", "int"),
        ("state", "text"),
        ("reason", "text"),
        ("prefill_instance", "text"),
        ("decode_instance", "text"),
        ("attempts", "int"),
        ("hbm_tokens", "int"),
        ("local_tokens", "int"),
        ("remote_tokens", "int"),
        ("ssd_tokens", "int"),
        ("available_tokens", "int?"),
        ("routed_tokens", "int?"),
        *((f"missed_{cause}_tokens", "int?") for cause in Miss),
        ("skip_reason", "text"),
        ("prefill_start_ns", "int"),
        ("first_token_ns", "int"),
        ("finish_ns", "int"),
        ("output_tokens", "int"),
        ("finish_reason", "text"),
        ("ttft_ns", "int?"),
        ("tbt_mean_ns", "int?"),
        ("tbt_p99_ns", "int?"),
        ("tbt_max_ns", "int?"),
        ("tbt_tail_ns", "int?"),
        ("slo_ttft_s", "float"),
        ("slo_tbt_s", "float"),
        ("met_slo", "bool"),
        ("blocks", "int[]"),
        ("output", "int32[]"),
        ("intervals_ns", "int[]"),
    ),
    "events": (
        ("time_ns", "int"),
        ("start_ns", "int"),
        ("kind", "text"),
        ("request_id", "int"),
        ("place", "text"),
        ("tier", "text"),
        ("first_block", "text"),
        ("blocks", "int"),
        ("tokens", "int"),
        ("bytes", "int"),
        ("detail", "text"),
    ),
    "decisions": (
        ("time_ns", "int"),
        ("request_id", "int"),
        ("stage", "text"),
        ("strategy", "text"),
        ("choice", "text"),
        ("source", "text"),
        ("reused_tokens", "int"),
        ("expected_s", "float"),
        ("names", "text[]"),
        *((quantity, "float[]") for quantity in QUANTITIES),
        ("others", "text"),
        ("reason", "text"),
        ("outcome_s", "float"),
        ("outcome", "text"),
    ),
    "reports": (
        ("time_ns", "int"),
        ("tick_ns", "int"),
        ("source", "text"),
        ("kind", "text"),
        ("values", "int[]"),
    ),
    "samples": (
        ("time_ns", "int"),
        ("source", "text"),
        ("metric", "text"),
        ("value", "float"),
    ),
    "outcomes": (
        ("time_ns", "int"),
        ("mechanism", "text"),
        ("call", "int"),
        ("payload", "text"),
    ),
}

DIGESTED = ("requests", "events", "decisions", "reports", "samples")
"""Always written. `outcomes` exists only where a real mechanism answered, and belongs to no digest."""


def type_of(kind: str) -> Any:
    """The Arrow type behind a kind that `SCHEMAS` names."""
    pa = arrow()
    if kind.endswith("[]"):
        return pa.list_(type_of(kind[:-2]))
    types = {"int": pa.int64, "int?": pa.int64, "int32": pa.int32, "bool": pa.bool_, "float": pa.float64}
    return types.get(kind, pa.string)()


def piece_rows(name: str) -> int:
    """Rows of a table that are made, or read, at a time: those with lists may be thousands of bytes each."""
    return 512 if any(kind.endswith("[]") for _, kind in SCHEMAS[name]) else 4096


def schema_of(name: str) -> Any:
    """The `pyarrow.Schema` of a table, with what its file says of itself."""
    metadata = {VERSION_KEY: str(SCHEMA_VERSION).encode(), b"mcjax_table": name.encode()}
    return arrow().schema([(column, type_of(kind)) for column, kind in SCHEMAS[name]], metadata=metadata)
