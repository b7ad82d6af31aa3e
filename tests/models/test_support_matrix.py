"""Family x load path x sharding: each against what transformers gave, and the committed table is what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import support_matrix
from golden_engine import MESHES, ONE, PATHS, golden, largest_error, logits, place, programs, weights_from, written

from family_cases import CONFIGS

BOUND = 2e-5


def check(case: str, path: str, mesh: str, folder: Path, measured: Any) -> None:
    checkpoint = None if path == "random" else written(path, case, folder)
    if path != "random" and checkpoint is None:
        return
    where = place(*(ONE | MESHES.get(case, {}))[mesh])
    weights = weights_from(path, case, checkpoint, where)
    error = largest_error(logits(programs(case), where, case, weights), golden(case))
    assert error < BOUND
    measured(case=case, path=path, mesh=mesh, dtype="float32", against="golden", error=error)


# The others are among the long checks: each mesh compiles two programs.
@pytest.mark.parametrize("path", PATHS[1:])
def test_each_kind_of_checkpoint_on_one_device(path: str, tmp_path: Path, measured: Any) -> None:
    check("llama", path, "one device", tmp_path, measured)


ROWS = [(case, mesh) for case in CONFIGS for mesh in ONE | MESHES.get(case, {})]
IN_CI = {"llama", "gemma3", "qwen3_moe", "deepseek_v3"}
"""Whose meshes are among the long checks; those of the rest are for whoever measures the page anew."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        pytest.param(case, mesh, marks=pytest.mark.check_long if mesh in ONE or case in IN_CI else pytest.mark.slow)
        for case, mesh in ROWS
    ],
    ids=str,
)
def test_each_kind_of_checkpoint_on_each_mesh(case: str, mesh: str, tmp_path: Path, measured: Any) -> None:
    for path in PATHS:
        check(case, path, mesh, tmp_path, measured)


def test_the_page_shows_what_was_measured() -> None:
    lines = support_matrix.read(support_matrix.DATA)
    text = support_matrix.PAGE.read_text(encoding="utf-8")
    assert support_matrix.page(text, lines) == text
    assert {line["case"] for line in lines} == set(CONFIGS)
    for line in lines:
        assert line["error"] < (BOUND if line["dtype"] == "float32" else 2e-2), line
