"""Reads Mooncake JSONL files: finds them, checks every line, and keeps the rows as flat columns."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import ConfigError, TraceError
from mcjax.workload.files import NS_PER_MS, JsonLine, find

PUBLISHED = {
    "conversation_trace.jsonl": "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
    "synthetic_trace.jsonl": "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
    "toolagent_trace.jsonl": "48a2db1a13d3bc05e6330140c64f604ba366df20d3c9e128b5c35a01c1fa5f71",
    "mooncake_trace.jsonl": "b434f1816a707f4bac697235588184ebc374c9907cb981bb65fb0643471fe711",
}
"""sha256 of the files of kvcache-ai/Mooncake, FAST25-release (Apache-2.0), by their names there."""


def new_column() -> array[int]:
    return array("q")


@dataclass(slots=True)
class Rows:
    """A trace in columns, one entry a row; row i's block ids are `ids[offsets[i] : offsets[i + 1]]`."""

    timestamp_ns: array[int] = field(default_factory=new_column)
    input_tokens: array[int] = field(default_factory=new_column)
    output_tokens: array[int] = field(default_factory=new_column)
    lines: array[int] = field(default_factory=new_column)
    ids: array[int] = field(default_factory=new_column)
    offsets: array[int] = field(default_factory=lambda: array("q", [0]))

    def __len__(self) -> int:
        return len(self.timestamp_ns)

    def block_ids(self, index: int) -> tuple[int, ...]:
        return tuple(self.ids[self.offsets[index] : self.offsets[index + 1]])


SOURCE = "The Mooncake traces are in FAST25-release/ of kvcache-ai/Mooncake"


def find_trace(path: str) -> Path:
    """The file `path` means. Raises `ConfigError` that lists every place tried."""
    return find(path, SOURCE)


def read_trace(path: Path, block_tokens: int, limit: int | None, verify_published: bool) -> tuple[Rows, str]:
    """The first `limit` rows (all if None) of `path`, checked, and the sha256 of the whole file."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        expected = PUBLISHED.get(path.name, sha256)
        if verify_published and sha256 != expected:
            problem = (
                f"not the published file of that name (sha256 {sha256}, published {expected}): download it again, "
                "or, if the change is meant, rename it or set workload.verify_published=false"
            )
            raise ConfigError("workload.path", str(path), problem)
        file.seek(0)
        return parse_rows(file, str(path), block_tokens, limit), sha256


def parse_rows(lines: Iterable[bytes], path: str, block_tokens: int, limit: int | None = None) -> Rows:
    """Rows of a JSONL file. Blank lines and unknown fields are passed over; anything else wrong raises `TraceError`.

    A block id must always follow the same id: it stands for its block and everything before it.
    """
    rows = Rows()
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(rows) >= limit:
            break
        if line.strip():
            _Line(path, number, line).append_to(rows, block_tokens)
    if len(rows) == 0:
        raise TraceError(path, 1, "timestamp", "the file holds no rows")
    _check_chains(rows, path)
    return rows


class _Line(JsonLine):
    """A line with Mooncake's fields."""

    def timestamp_ns(self) -> int:
        if "session_id" in self.fields and "timestamp" not in self.fields:
            raise self.error("timestamp", "is missing: a session's later turns, which workload=aiperf reads, have none")
        return self.milliseconds_ns("timestamp")

    def append_to(self, rows: Rows, block_tokens: int) -> None:
        timestamp_ns = self.timestamp_ns()
        if rows.timestamp_ns and timestamp_ns < rows.timestamp_ns[-1]:
            before = f"{rows.timestamp_ns[-1] / NS_PER_MS:g} ms on line {rows.lines[-1]}"
            raise self.error("timestamp", f"goes backwards: {timestamp_ns / NS_PER_MS:g} ms after {before}")
        input_tokens = self.whole("input_length", 1)
        output_tokens = self.whole("output_length", 0)
        ids = self.wholes("hash_ids", 2**63 - 1)
        blocks = -(-input_tokens // block_tokens)
        if len(ids) != blocks:
            problem = f"has {len(ids)} ids, but {input_tokens} tokens make {blocks} blocks of {block_tokens}"
            raise self.error("hash_ids", problem)
        rows.timestamp_ns.append(timestamp_ns)
        rows.input_tokens.append(input_tokens)
        rows.output_tokens.append(output_tokens)
        rows.lines.append(self.number)
        rows.ids.extend(ids)
        rows.offsets.append(len(rows.ids))


def _check_chains(rows: Rows, path: str) -> None:
    """Raise for the first line where an id follows another id than it did before (or itself, or a later one)."""
    ids = _numbers(rows.ids)
    starts = _numbers(rows.offsets)[:-1]
    parents = np.empty_like(ids)
    parents[1:] = ids[:-1]
    parents[starts] = -1
    order = np.argsort(ids, kind="stable")  # within one id, in the order of the file
    ordered, parents = ids[order], parents[order]
    changed = (ordered[1:] == ordered[:-1]) & (parents[1:] != parents[:-1])
    if not changed.any():
        return
    first = int(order[1:][changed].min())
    row = int(np.searchsorted(starts, first, side="right")) - 1
    place = f"id {rows.ids[first]} at index {first - int(starts[row])}"
    problem = f"{place} did not follow the same id before; an id stands for its block and all blocks before it"
    raise TraceError(path, rows.lines[row], "hash_ids", problem)


def _numbers(column: array[int]) -> NDArray[np.int64]:
    return np.frombuffer(column, np.int64)
