"""The overview draws what the tables say, of any size, without touching pyplot."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from track_fixtures import ARGUMENTS, MS, fabricate

from mcjax.track.plots.instances import MOST_INSTANCES
from mcjax.track.plots.overview import overview
from mcjax.track.plots.style import BLUE
from mcjax.track.run import Run
from mcjax.track.summary import summarise


def run_of(tables: Mapping[str, Any]) -> Run:
    return Run(None, summarise(tables, **ARGUMENTS), {}, tables)


def test_four_panels_with_data(tmp_path: Path) -> None:
    figure = overview(run_of(fabricate().tables()))
    ttft, tbt, activity, gauges = figure.axes[:4]
    assert ttft.get_title(loc="left") == "Time to first token"
    # As the summary has it: the first request came before the window.
    assert tbt.get_legend().get_texts()[0].get_text() == "p50  3 ms"
    assert [label.get_text() for label in activity.get_yticklabels()] == ["p0", "p1", "d0", "d1"]
    assert [text.get_text() for text in gauges.get_legend().get_texts()] == ["pool_fill", "queue_requests"]
    assert BLUE in {line.get_color() for line in ttft.get_lines()}
    figure.savefig(tmp_path / "overview.png")
    assert (tmp_path / "overview.png").read_bytes().startswith(b"\x89PNG")


def test_an_empty_run_still_has_a_picture() -> None:
    tables = {name: table.slice(0, 0) for name, table in fabricate().tables().items()}
    figure = overview(run_of(tables))
    assert {text.get_text() for panel in figure.axes for text in panel.texts} == {
        "no requests", "no intervals", "no steps", "no samples",
    }  # fmt: skip


def test_instances_are_shown_in_order_and_bounded() -> None:
    recorder = fabricate()
    for index in range(40):
        recorder.event((index + 2) * MS, "mixed_step", index, f"m{index}", start_ns=index * MS)
    activity = overview(run_of(recorder.tables())).axes[2]
    labels = [label.get_text() for label in activity.get_yticklabels()]
    assert len(labels) == MOST_INSTANCES
    assert labels[:3] == ["m0", "m1", "m2"]
    assert "the first 32 of 44 instances" in activity.get_xlabel()


@pytest.mark.parametrize("module", ["mcjax.track.tracker", "mcjax.track.console", "mcjax.track.plots.overview"])
def test_heavy_libraries_are_imported_only_when_used(module: str) -> None:
    heavy = {"pyarrow", "pandas", "rich", "wandb", "matplotlib", "jax", "yaml"}
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
