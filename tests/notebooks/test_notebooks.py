"""Every notebook is stored without outputs, and runs from top to bottom, with a trace and without one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TraceFinder = Callable[[str], Path]
ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def execute(path: Path, folder: Path) -> str:
    """Run a notebook in `folder`, as Jupyter would; returns what its cells printed or showed as text."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook: Any = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute()  # raises at the first cell that fails
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"] == []
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    text = "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs)
    return f"{text}\n{pictures} pictures"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    assert [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
    assert any(cell["cell_type"] == "code" for cell in cells)


@pytest.fixture(params=[True, False], ids=["trace", "no trace"])
def traced(
    request: pytest.FixtureRequest, traces: TraceFinder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Whether the notebook finds a trace; it runs this source either way."""
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", source)
    folder = traces("mooncake_fast25_conversation.jsonl").parent if request.param else tmp_path
    monkeypatch.setenv("MCJAX_TRACES", str(folder))
    return request.param


@pytest.mark.notebooks
def test_first_look(traced: bool, tmp_path: Path) -> None:
    shown = execute(ROOT / "notebooks" / "01_first_look.ipynb", tmp_path)
    assert ("there is no Mooncake trace" in shown) is not traced
    assert "5 pictures" in shown
    assert "timeline since arrival" in shown


@pytest.mark.notebooks
@pytest.mark.timeout(400)  # forty runs on two cores, which others may use too
def test_compare(traced: bool, tmp_path: Path) -> None:
    shown = execute(ROOT / "notebooks" / "02_compare.ipynb", tmp_path)
    assert ("there is no Mooncake trace" in shown) is not traced
    assert "40 runs in 5 groups" in shown
    assert "95 % intervals: studentised bootstrap over 8 pairs" in shown
    assert "serves most within its bounds; against prefill=" in shown
    assert "2 pictures" in shown
    if traced:
        assert "prefill=kvcache_centric serves most within its bounds; against prefill=cache_aware" in shown
