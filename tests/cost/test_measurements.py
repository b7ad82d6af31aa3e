"""Files of measured steps: what is read, and where mistakes are said to be."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcjax.cost.measurements import COLUMNS, Measurement, read, write_csv
from mcjax.errors import ConfigError, TraceError

HEADER = "kind,start_tokens,length_tokens,batch,context_tokens,seconds\n"
ROWS = [
    Measurement("prefill", 0, 512, 0, 0, 0.25),
    Measurement("decode", 0, 0, 4, 9000, 0.03125),
    Measurement("mixed", 512, 1024, 4, 9000, 0.5),
]


def test_csv_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    write_csv(str(path), ROWS, "one machine\nof mine")
    assert path.read_text().startswith("# one machine\n# of mine\nkind,")
    assert read(str(path)) == ROWS
    columns = {name: [getattr(row, name) for row in ROWS] for name in COLUMNS}
    columns["batch"] = [value or None for value in columns["batch"]]  # what a kind has not may be null
    pq.write_table(pa.table(columns), tmp_path / "steps.parquet")
    assert read(str(tmp_path / "steps.parquet")) == ROWS


def test_columns_may_come_in_any_order_and_cells_be_empty(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("seconds, batch,kind,start_tokens,length_tokens,context_tokens\n\n0.25,,prefill,0, 512 ,\n")
    assert read(str(path)) == [ROWS[0]]


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("kind,start_tokens,length_tokens,batch,context_tokens\nprefill,0,1,,\n", 1, "seconds"),
        (HEADER.replace("\n", ",speed\n"), 1, "speed"),
        (HEADER.replace("\n", ",batch\n"), 1, "batch"),
        (HEADER + "prefill,0,512,,,0.25\n\n# note\nextend,0,512,,,0.25\n", 5, "kind"),
        (HEADER + "prefill,-1,512,,,0.25\n", 2, "start_tokens"),
        (HEADER + "prefill,0,0,,,0.25\n", 2, "length_tokens"),
        (HEADER + "prefill,0,12.5,,,0.25\n", 2, "length_tokens"),
        (HEADER + "prefill,0,512,3,,0.25\n", 2, "batch"),
        (HEADER + "decode,,,,100,0.25\n", 2, "batch"),
        (HEADER + "decode,,,0,100,0.25\n", 2, "batch"),
        (HEADER + "decode,,,1,many,0.25\n", 2, "context_tokens"),
        (HEADER + "decode,,,1,100,0\n", 2, "seconds"),
        (HEADER + "decode,,,1,100,nan\n", 2, "seconds"),
        (HEADER + "decode,,,1,100\n", 2, "seconds"),
        (HEADER + "decode,,,1,100,0.1,7\n", 2, "seconds"),
    ],
)
def test_mistakes_name_line_and_column(tmp_path: Path, text: str, line: int, column: str) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as raised:
        read(str(path))
    assert (raised.value.line, raised.value.field, raised.value.path) == (line, column, str(path))


def test_a_parquet_mistake_names_its_row(tmp_path: Path) -> None:
    columns = {name: [getattr(row, name) for row in ROWS] for name in COLUMNS}
    pq.write_table(pa.table({**columns, "seconds": [0.25, -1.0, 0.5]}), tmp_path / "steps.parquet")
    with pytest.raises(TraceError, match="line 2, field 'seconds'"):
        read(str(tmp_path / "steps.parquet"))


def test_files_that_are_none(tmp_path: Path) -> None:
    for name, content, problem in (
        ("steps.txt", "", "a .csv or a .parquet"),
        ("steps.csv", HEADER, "holds no rows"),
        ("empty.csv", "", "holds no rows"),
        ("steps.parquet", "kind", "no Parquet file"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=problem):
            read(str(tmp_path / name))
    for name in ("nowhere.csv", "nowhere.parquet"):
        with pytest.raises(ConfigError, match="no such file"):
            read(str(tmp_path / name))
