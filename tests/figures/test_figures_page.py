"""docs/figures.md against the command that writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcjax.app.figures import page
from mcjax.app.figures.row import Row

DOCS = Path(__file__).parents[2] / "docs" / "figures.md"


def test_a_line_says_how_far_off() -> None:
    assert page.line(Row("A2", "hits", 66.0, 65.1, "%", "ids")) == "| A2 | hits | 65.1 % | 66.0 % | -0.9 points | ids |"
    assert page.line(Row("A5", "rate", 6.0, 5.86, "GB/s")) == "| A5 | rate | 5.86 GB/s | 6 GB/s | -2.3 % |  |"
    assert page.line(Row("A1", "requests", 12031, 12031)) == "| A1 | requests | 12,031 | 12,031 | +0.0 % |  |"
    assert "+0.0 %" in page.line(Row("A13", "link", 87.0, 86.999, "GB/s"))


def test_the_page_has_every_row_once() -> None:
    rows = [Row(anchor, f"row {anchor}", 1.0, 2.0) for _, anchors in page.PARTS for anchor in anchors]
    text = page.render(reversed(rows))
    assert text.startswith(page.HEAD)
    assert all(text.count(page.line(row)) == 1 for row in rows)


def test_missing_traces_are_told(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MCJAX_TRACES", str(tmp_path))
    assert page.command(["--output", "figures.md"]) == 2
    assert "conversation_trace.jsonl: no such file" in capsys.readouterr().err
    assert not (tmp_path / "figures.md").exists()


def test_docs_hold_the_rows_that_take_no_time(trace_rows) -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert text.startswith(page.HEAD)
    for row in page.fast_rows(trace_rows):
        assert page.line(row) in text, f"run `{page.COMMAND}`"


@pytest.mark.check_long
@pytest.mark.timeout(900)
def test_docs_are_what_the_command_writes(runs, trace_rows) -> None:
    rows = [*page.fast_rows(trace_rows), *page.pool_rows(trace_rows), *page.run_rows(runs, trace_rows)]
    assert page.render(rows) == DOCS.read_text(encoding="utf-8"), f"run `{page.COMMAND}`"
