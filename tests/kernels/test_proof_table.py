"""The command that shows all cells, its data file and its tables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mcjax.errors import ConfigError
from mcjax.kernels import prove
from mcjax.kernels.proof import table
from mcjax.kernels.proof.cells import Cell, cells
from mcjax.kernels.proof.table import Row
from mcjax.kernels.proof.worker import Worker

ROOT = Path(__file__).parents[2]
PACK = Cell("kv_pack-tpu", "interpret", "float32", 64, 16, "llama3-8b")
ROW = Row(PACK.name, "passed", "0.10.2", "", "0123abcd", "2026-01-02", 1.5)


@pytest.fixture
def stand_ins(monkeypatch):
    """Where a worker's child process finds `proof_bodies`."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]))
    return "proof_bodies"


def test_a_crash_is_a_row_and_the_next_cell_goes_on(stand_ins) -> None:
    with Worker(60, stand_ins) as worker:
        assert worker.show(PACK)[0].status == "passed"
        crashed, _ = worker.show(replace(PACK, body="kv_unpack-gpu"))
        assert crashed.status == "crashed"
        assert "LLVM ERROR: out of registers" in crashed.error
        failed, _ = worker.show(replace(PACK, body="kv_pack-gpu"))
        assert (failed.status, failed.error) == ("failed", "a block differs from the reference's")


def test_a_cell_that_does_not_end_is_overdue(stand_ins) -> None:
    with Worker(0.05, stand_ins) as worker:  # less than jax takes to be imported
        overdue, seconds = worker.show(PACK)
    assert overdue.status == "overdue"
    assert "0.05 s" in overdue.error
    assert seconds >= 0.05


def test_rows_survive_a_file_that_was_cut_off(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    other = replace(ROW, cell=ROW.cell.replace("/float32/", "/int8/"), status="failed", error="x", facts={"error": 0.5})
    table.write(path, [ROW, other])
    later = replace(ROW, date="2026-01-03", seconds=0.0)
    with path.open("a") as file:
        file.write(later.to_json() + "\n" + later.to_json()[:20])
    assert sorted(table.read(path).values(), key=str) == sorted([later, other], key=str)
    path.write_text("{}\n" + ROW.to_json() + "\n")
    with pytest.raises(ConfigError, match="line 1"):
        table.read(path)
    assert table.read(tmp_path / "none") == {}


def test_the_tables_say_what_failed_what_is_open_and_what_only_compilers_saw() -> None:
    failed = [replace(ROW, cell=f"prefill-tpu/v6e/int8/D=64/page={page}/llama3-8b/plain/8k") for page in (16, 32)]
    failed = [replace(row, status="failed", error="vmem: 9 bytes | 8 are there", compiler="libtpu 1") for row in failed]
    text = table.markdown([ROW, *failed], [PACK, PACK, Cell.of(failed[0].cell), Cell.of(failed[1].cell)])
    assert "### jax 0.10.2, libtpu 1" in text
    said = "3 cells, run 2026-01-02. Digests of the code: `kv_pack` 0123abcd; `prefill` 0123abcd."
    assert said in text
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| `")}
    assert lines["`kv_pack-tpu`"].split("|")[2:6] == [" 1 of 2 ", " open ", " open ", " open "]
    assert lines["`prefill-tpu`"].split("|")[5] == " 0, 2 failed "
    assert lines["`prefill-gpu_mosaic`"].split("|")[2].startswith(" compiler only")
    assert "| failed | `prefill-tpu` | v6e |" in text
    assert "and 1 more | vmem: 9 bytes / 8 are there |" in text
    assert table.markdown([], []) == "Nothing has been run yet."


def test_the_page_shows_the_data() -> None:
    """Else: `python -m mcjax.kernels.prove --only nothing`, which writes the page anew."""
    page = ROOT / prove.PAGE
    rows = table.read(ROOT / prove.DATA)
    text = page.read_text(encoding="utf-8")
    assert table.shown_in(text, table.markdown(rows.values(), cells()), page) == text
    for row in rows.values():
        assert row.status in {"passed", "failed", "crashed", "overdue"}
        assert Cell.of(row.cell).name == row.cell
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row.date)
        assert (row.compiler == "") == (Cell.of(row.cell).rung in ("interpret", "races"))


def test_the_command_goes_on_where_it_was(tmp_path, capsys, monkeypatch) -> None:
    """Really: the real body, in a child process."""
    data, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    page.write_text(f"Before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    only = ["--scope", "product", "--only", "kv_pack-tpu/interpret/bfloat16/D=64/page=16/"]
    options = ["--data", str(data), "--page", str(page), *only]
    status = prove.main(options)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert len(rows) == 1
    assert status == int(rows[0]["status"] != "passed")
    assert "### jax" in page.read_text()
    assert page.read_text().startswith("Before\n")
    assert page.read_text().endswith("\nafter\n")

    with data.open("a") as file:  # of a body that takes such a cell no more
        file.write(replace(ROW, cell="gone/h200/float32/D=1/page=1/llama3-8b/plain/8k").to_json() + "\n")
    monkeypatch.setattr(Worker, "show", lambda *_: pytest.fail("it has a result"))
    assert prove.main(options) == status
    assert "gone" not in data.read_text()
    capsys.readouterr()
    assert prove.main([*options, "--list"]) == 0
    assert rows[0]["status"] in capsys.readouterr().out
    monkeypatch.setattr(table, "digest_of", lambda _: "other")
    assert prove.main([*options, "--list"]) == 0
    assert "of older code" in capsys.readouterr().out


def test_what_this_environment_lacks_is_said(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(prove, "missing_for", lambda rung: ("libtpu", "aot-tpu") if rung == "v6e" else None)
    assert prove.main(["--data", str(tmp_path / "x"), "--page", str(tmp_path / "y"), "--rungs", "v6e"]) == 0
    said = capsys.readouterr().out
    assert "v6e: left out, libtpu is not installed; `pip install 'mcjax[aot-tpu]'` brings it" in said
    assert "no such cell" in said


def test_it_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mcjax.kernels.prove", "--list", "--rungs", "interpret", "--scope", "cover"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=True,
    )
    assert len(done.stdout.splitlines()) == sum(cell.rung == "interpret" for cell in cells(["cover"]))
