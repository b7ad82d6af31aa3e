"""Files that a paper can take: embedded fonts, sizes of columns, equal bytes, and the numbers beside them."""

from __future__ import annotations

import base64
import csv
import io
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from plots_fixtures import repeated, run_with

from mcjax.errors import ConfigError
from mcjax.track.plots.kinds import draw

TWO = {"ran$dom <b>": [(10, 20), (15, 30)], "_cache": [(5, 6), (6, 7)]}


@pytest.mark.parametrize("kind", ["ttft_cdf", "goodput", "pareto", "links", "timeline"])
def test_fonts_are_embedded_as_truetype(kind: str, tmp_path: Path) -> None:
    picture, numbers = draw(repeated(TWO), kind).save(tmp_path / "figure.pdf")
    pdf = picture.read_bytes()
    assert pdf.startswith(b"%PDF")
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    assert numbers == tmp_path / "figure.csv"
    assert len(numbers.read_text().splitlines()) > 1


def test_widths_are_those_of_a_column_and_a_page(tmp_path: Path) -> None:
    for width, inches in (("column", 3.33), ("page", 7.0)):
        picture, _ = draw(run_with(), "goodput", width=width).save(tmp_path / f"{width}.pdf")
        (box,) = re.findall(rb"/MediaBox \[\s*0 0 ([\d.]+) ", picture.read_bytes())
        assert float(box) == pytest.approx(72 * inches, abs=0.1)


def test_equal_runs_give_equal_files(tmp_path: Path) -> None:
    for suffix in ("pdf", "svg"):
        first, second = (draw(repeated(TWO), "goodput").save(tmp_path / f"{name}.{suffix}")[0] for name in "ab")
        assert first.read_bytes() == second.read_bytes()


def test_the_csv_holds_the_data_exactly() -> None:
    drawn = draw(repeated(TWO), "ttft_cdf")
    found = list(csv.DictReader(io.StringIO(drawn.csv())))
    for name in ("ttft_s", "share", "low", "high"):
        assert [float(row[name]) for row in found] == drawn.data.column(name).to_pylist()
    assert {row["group"] for row in found} == set(TWO)


def test_labels_are_text_and_nothing_else() -> None:
    drawn = draw(repeated(TWO), "ttft_cdf", title="a $x^2$ & <script>")
    (legend,) = drawn.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ran$dom <b>", "cache"]
    ElementTree.fromstring(drawn.svg())  # well-formed, whatever the labels hold


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    drawn = draw(run_with(), "goodput")
    with pytest.raises(ConfigError, match=r"out=fig.jpg: its suffix says what is written; allowed: .pdf, .png, .svg"):
        drawn.save("fig.jpg")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        drawn.save(tmp_path / "file" / "fig.pdf")
    assert drawn.save(tmp_path / "new" / "folder" / "fig.svg")[0].exists()


def test_a_notebook_shows_the_picture_and_its_note() -> None:
    drawn = run_with().plot("goodput", title='a "title"')
    shown = drawn._repr_html_()
    (picture,) = re.findall(r"base64,([^']+)'", shown)
    assert base64.b64decode(picture).startswith(b"\x89PNG")
    assert "alt='a &quot;title&quot;'" in shown
    assert "Requests a second that completed" in shown
    assert drawn._repr_png_().startswith(b"\x89PNG")
