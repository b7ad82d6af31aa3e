"""Tables on disk: round trip, version, damage, and a digest of rows rather than of bytes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from track_fixtures import fabricate

from mcjax.errors import RunError
from mcjax.track import tables as files
from mcjax.track.digest import digest
from mcjax.track.schemas import DIGESTED, SCHEMAS

KNOWN_DIGEST = "eebcfcfcfc70e9604f678ff6e1a8b5163347d45dc0fdc3156ca71fb827558b51"


def test_tables_have_the_declared_columns() -> None:
    for name, table in fabricate().tables().items():
        assert table.column_names == [column for column, _ in SCHEMAS[name]]
        assert files.empty(name).schema == table.schema


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    tables = fabricate().tables()
    files.write(tables, tmp_path)
    assert not (tmp_path / "outcomes.parquet").exists()
    for name in DIGESTED:
        back = files.read(name, tmp_path)
        assert back.schema.metadata[b"mcjax_schema"] == b"4"
        assert back.schema.equals(tables[name].schema)
        assert str(back.to_pylist()) == str(tables[name].to_pylist())  # text, since NaN differs from itself


def test_digest_is_of_the_rows(tmp_path: Path) -> None:
    tables = fabricate().tables()
    expected = digest(tables)
    files.write(tables, tmp_path)
    assert digest({name: files.read(name, tmp_path) for name in DIGESTED}) == expected
    chunked = {name: pa.concat_tables([table.slice(0, 2), table.slice(2)]) for name, table in tables.items()}
    assert digest(chunked) == expected
    sliced = {name: pa.concat_tables([table.slice(0, 1), table]).slice(1) for name, table in tables.items()}
    assert digest(sliced) == expected


def test_digest_is_the_same_everywhere() -> None:
    """The value is part of the contract: another machine, Python or pyarrow must find the same one."""
    tables = fabricate().tables()
    assert digest(tables) == KNOWN_DIGEST
    assert digest_by_the_book(tables) == KNOWN_DIGEST


def digest_by_the_book(tables: Mapping[str, Any]) -> str:
    """The definition in docs/track.md, value by value and without Arrow's memory."""

    def sha256(*parts: bytes) -> bytes:
        return hashlib.sha256(b"".join(parts)).digest()

    def number(value: int) -> bytes:
        return struct.pack("<q", value)

    def text(value: str) -> bytes:
        return number(len(value.encode())) + value.encode()

    def cells(values: list[Any], kind: str) -> bytes:
        missing = sha256(*(number(index) for index, value in enumerate(values) if value is None))
        present = [value for value in values if value is not None]
        lengths, held = sha256(), b""
        if kind.endswith("[]"):
            lengths = sha256(*(number(len(value)) for value in present))
            held = cells([item for value in present for item in value], kind[:-2])
        elif kind == "text":
            lengths = sha256(*(number(len(value.encode())) for value in present))
            held = sha256("".join(present).encode())
        elif kind == "float":
            held = sha256(*(b"\0\0\0\0\0\0\xf8\x7f" if v != v else struct.pack("<d", v) for v in present))
        else:
            held = sha256(*(number(int(value)) for value in present))
        return sha256(number(len(values)), missing, lengths, held)

    def table(name: str) -> bytes:
        parts = [text(name)]
        for column, kind in SCHEMAS[name]:
            parts += [text(column), cells(tables[name].column(column).to_pylist(), kind)]
        return sha256(*parts)

    return sha256(*(table(name) for name in DIGESTED)).hex()


@pytest.mark.parametrize("name", DIGESTED)
def test_digest_sees_every_change(name: str) -> None:
    tables = fabricate().tables()
    found = {digest(tables)}
    table = tables[name]
    for index, column in enumerate(table.column_names):
        values = table.column(index).to_pylist()
        values[0] = _another(values[0], table.schema.field(index).type)
        changed = table.set_column(index, column, pa.array(values, table.schema.field(index).type))
        found.add(digest({**tables, name: changed}))
    found.add(digest({**tables, name: table.slice(1)}))
    found.add(digest({**tables, name: table.take(pa.array(range(table.num_rows - 1, -1, -1)))}))
    assert len(found) == len(table.column_names) + 3


def _another(value: object, kind: pa.DataType) -> object:
    if pa.types.is_list(kind):
        return [] if value or value is None else ["x"] if pa.types.is_string(kind.value_type) else [1]
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value + "x"
    return 1 if value is None or value != value else value + 1  # type: ignore[operator]


def test_digest_tells_null_from_zero_and_moves_between_cells() -> None:
    tables = fabricate().tables()

    def with_names(cells: list[str]) -> str:
        samples = tables["samples"].set_column(1, "source", pa.array(cells))
        return digest({**tables, "samples": samples})

    assert with_names(["ab", "c"]) != with_names(["a", "bc"])
    parent = tables["requests"].column_names.index("parent")
    zeros = tables["requests"].set_column(parent, "parent", pa.array([0] * 5, pa.int64()))
    assert digest({**tables, "requests": zeros}) != digest(tables)


def test_digest_knows_one_nan() -> None:
    tables = fabricate().tables()

    def with_value(value: float) -> str:
        values = pa.array(np.array([value, 1.0]), from_pandas=False)
        return digest({**tables, "samples": tables["samples"].set_column(3, "value", values)})

    assert with_value(float("nan")) == with_value(-float("nan"))
    assert with_value(float("nan")) != with_value(0.0)


def test_other_versions_and_damage_are_named(tmp_path: Path) -> None:
    tables = fabricate().tables()
    files.write(tables, tmp_path)
    path = tmp_path / "events.parquet"
    pq.write_table(tables["events"].replace_schema_metadata({b"mcjax_schema": b"9"}), path)
    with pytest.raises(RunError, match=r"events\.parquet has schema version 9"):
        files.read("events", tmp_path)
    pq.write_table(tables["events"].replace_schema_metadata({}), path)
    with pytest.raises(RunError, match=r"schema version none"):
        files.read("events", tmp_path)
    pq.write_table(tables["events"].drop(["kind"]).replace_schema_metadata({b"mcjax_schema": b"4"}), path)
    with pytest.raises(RunError, match="lacks the columns kind"):
        files.read("events", tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RunError, match=rf"{tmp_path}.*events\.parquet is missing or damaged"):
        files.read("events", tmp_path)
    path.unlink()
    with pytest.raises(RunError, match="missing or damaged"):
        files.read("events", tmp_path)
