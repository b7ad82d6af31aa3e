"""The pairwise cover of the proof ladder, each cell where it can be shown; the whole of it: `mcjax.kernels.prove`."""

from __future__ import annotations

import pytest

from mcjax.kernels.proof.cells import INTERPRETED, TPUS, Cell, cover
from mcjax.kernels.proof.show import show

# Interpreted cells of small pages come with every run of the tests. Larger ones, and the race detector, take seconds.
QUICK_NUMBERS = 64 * 64


def marked(cell: Cell):
    if cell.rung in TPUS:
        marks = [pytest.mark.aot_tpu]
    elif cell.rung not in INTERPRETED:
        marks = [pytest.mark.aot_gpu]
    elif cell.rung == "races" or cell.head_dim * cell.page_tokens > QUICK_NUMBERS:
        marks = [pytest.mark.check_long]
    else:
        marks = []
    return pytest.param(cell, id=cell.name, marks=marks)


@pytest.mark.parametrize("cell", [marked(cell) for cell in cover()])
def test_cell(cell) -> None:
    outcome = show(cell)
    assert outcome.status == "passed", outcome.error
