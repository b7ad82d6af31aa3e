"""docs/notebooks has every notebook with what it showed: its cells in order, and pictures that are there."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "images" / "notebooks"
NAMES = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 80_000


@pytest.fixture(scope="module")
def render() -> Any:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("render", ROOT / "notebooks" / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_outputs(page: str) -> str:
    """A page without what the cells showed."""
    shown = r"\n\n(?:```text\n.*?\n```|!\[picture \d+ of \w+\]\([^)]+\))(?=\n)"
    return re.sub(shown, "", page, flags=re.DOTALL).rstrip()


def png(size: int = 40) -> bytes:
    image = pytest.importorskip("PIL.Image").effect_noise((size, size), 50)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_the_cells_of_the_notebook(name: str, render: Any) -> None:
    notebook = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())
    page = (ROOT / "docs" / "notebooks" / f"{name}.md").read_text()
    bare, _ = render.page_of(name, notebook)  # it is stored without outputs
    again = f"run: python notebooks/render.py {name}"
    assert without_outputs(page) == bare.rstrip(), again
    assert page.count("```text") >= 2, "it shows what came out"
    for folder in (str(ROOT), str(Path.home()), tempfile.gettempdir(), os.environ.get("MCJAX_TRACES", str(ROOT))):
        assert f"{folder}{os.sep}" not in page, "paths are those of whoever rendered it"


@pytest.mark.parametrize("name", NAMES)
def test_the_pictures_are_there_and_small(name: str) -> None:
    page = (ROOT / "docs" / "notebooks" / f"{name}.md").read_text()
    shown = re.findall(r"\(\.\./images/notebooks/([^)]+)\)", page)
    assert shown == [f"{name}-{number}.png" for number in range(1, len(shown) + 1)]
    assert shown
    for file in shown:
        assert (PICTURES / file).read_bytes().startswith(b"\x89PNG")
        assert (PICTURES / file).stat().st_size < MOST_BYTES


def test_nothing_is_left_over() -> None:
    assert sorted(path.stem for path in (ROOT / "docs" / "notebooks").glob("*.md")) == NAMES
    assert {path.stem.rpartition("-")[0] for path in PICTURES.iterdir()} == set(NAMES)


def test_a_page_of_every_kind_of_output(render: Any) -> None:
    picture = {
        "output_type": "display_data",
        "data": {"image/png": base64.b64encode(png()).decode(), "text/plain": "x"},
    }
    cells = [
        {"cell_type": "markdown", "source": ["# Head\n", "words"]},
        {"cell_type": "code", "source": "print(1)", "outputs": [{"output_type": "stream", "text": "one  \ntwo\n"}]},
        {"cell_type": "code", "source": "value", "outputs": [{"data": {"text/plain": ["3"]}}, picture, picture]},
        {"cell_type": "code", "source": "silent()", "outputs": []},
    ]
    page, pictures = render.page_of("09_name", {"cells": cells})
    assert page.split("\n\n")[1:] == [
        "# Head\nwords",
        "```python\nprint(1)\n```",
        "```text\none\ntwo\n```",
        "```python\nvalue\n```",
        "```text\n3\n```",
        "![picture 1 of 09_name](../images/notebooks/09_name-1.png)",
        "![picture 2 of 09_name](../images/notebooks/09_name-2.png)",
        "```python\nsilent()\n```\n",
    ]
    assert list(pictures) == ["09_name-1.png", "09_name-2.png"]
    bare, _ = render.page_of("09_name", {"cells": [{**cell, "outputs": []} for cell in cells]})
    assert without_outputs(page) == bare.rstrip()


def test_pictures_are_made_smaller(render: Any) -> None:
    small = render.smaller(png(200))
    assert small.startswith(b"\x89PNG")
    colours = pytest.importorskip("PIL.Image").open(io.BytesIO(small)).getcolors()
    assert len(colours) <= render.COLOURS
