"""The report in a real browser: drawn, within its window, in light and dark, and without any network."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from chromium import Chromium, browser

from mcjax.track.plots.kinds import KINDS
from mcjax.track.report.page import report
from mcjax.track.sweep import Sweep

pytestmark = pytest.mark.browser

WIDE, NARROW = 1200, 390
DARK = ("--blink-settings=preferredColorScheme=0",)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Chromium:
    return Chromium(browser(), tmp_path_factory.mktemp("chromium"))


@pytest.fixture(scope="module")
def page(drawn_sweep: Sweep) -> Path:
    return report(drawn_sweep, drawn_sweep.directory / "report.html")


def kept(picture: Path) -> Path:
    """Also where somebody can look at it, if MCJAX_SCREENSHOTS names a folder."""
    folder = os.environ.get("MCJAX_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, folder)
    return picture


def colours(picture: Path, box: list[float]) -> dict[tuple[int, int, int], int]:
    """How many pixels of each colour lie in a box (left, top, right, bottom)."""
    from PIL import Image

    with Image.open(picture) as image:
        left, top, right, bottom = map(round, box)
        part = image.convert("RGB").crop((left, top, right, bottom))
        found: Any = part.getcolors(part.width * part.height)
    return {colour: count for count, colour in found}


def brightness(colour: tuple[int, int, int]) -> float:
    return sum(colour) / (3 * 255)


@pytest.mark.parametrize(("name", "flags"), [("light", ()), ("dark", DARK)])
def test_every_figure_is_painted(chromium: Chromium, page: Path, name: str, flags: tuple[str, ...]) -> None:
    found = chromium.measure(page, WIDE)
    assert found["width"] == WIDE
    picture = kept(chromium.paint(page, WIDE, found["height"], f"report_{name}.png", flags))
    from PIL import Image

    with Image.open(picture) as image:
        assert image.size == (WIDE, found["height"])
    assert list(found["figures"]) == [f"figure-{kind}" for kind in KINDS]
    for figure, box in found["figures"].items():
        left, top, right, bottom = box
        assert right - left > 350, figure
        assert bottom - top > 100, figure
        there = colours(picture, box)
        paper = max(there, key=lambda colour: there[colour])
        assert (brightness(paper) > 0.9) if name == "light" else (brightness(paper) < 0.2), figure
        # Axes, labels, lines and their soft edges: an empty panel has a handful of colours.
        assert len(there) > 100, figure
        coloured = sum(count for colour, count in there.items() if max(colour) - min(colour) > 60)
        assert coloured > 0.005 * sum(there.values()), figure
        ink = sum(count for colour, count in there.items() if abs(brightness(colour) - brightness(paper)) > 0.6)
        assert ink > 300, figure


def test_the_question_is_painted(chromium: Chromium, page: Path) -> None:
    found = chromium.measure(page, WIDE)
    there = colours(chromium.paint(page, WIDE, 600, "head.png"), found["title"])
    dark = sum(count for colour, count in there.items() if brightness(colour) < 0.4)
    assert dark > 0.02 * sum(there.values())


@pytest.mark.parametrize("width", [NARROW, 768, WIDE])
def test_nothing_is_wider_than_the_window(chromium: Chromium, page: Path, width: int) -> None:
    found = chromium.measure(page, width)
    assert found["wide"] == []
    assert found["width"] <= width
    assert found["size"] >= 12  # pixels; no text is tiny on a phone
    if width == NARROW:
        kept(chromium.paint(page, width, found["height"], "report_narrow.png"))


def test_the_probe_finds_what_sticks_out(chromium: Chromium, page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    text = page.read_text(encoding="utf-8")
    broken.write_text(text.replace("<header>", '<header><div style="width:900px">wide</div>', 1), encoding="utf-8")
    found = chromium.measure(broken, NARROW)
    assert len(found["wide"]) == 1
    assert found["width"] > NARROW


def test_no_request_leaves_the_page(chromium: Chromium, page: Path, tmp_path: Path) -> None:
    assert chromium.wanted(page) == set()
    open_page = tmp_path / "open.html"
    planted = '<img src="http://elsewhere.example/x.png"></main>'
    text = page.read_text(encoding="utf-8").replace("</main>", planted, 1)
    open_page.write_text(text, encoding="utf-8")
    assert chromium.wanted(open_page) == set()  # the page's own policy forbids it
    open_page.write_text(text.replace("Content-Security-Policy", "Nothing"), encoding="utf-8")
    assert chromium.wanted(open_page) == {"elsewhere.example"}
