"""`cost=measured`: chunk by chunk between measured points, exact where it must be, refused where it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcjax.cost.measured import Copies, Line, Machine, Measured, Overheads, Sizes, Spread, read, write
from mcjax.cost.measurements import Measurement
from mcjax.errors import ConfigError

SIZES = Sizes(
    pages=64,
    page_tokens=16,
    max_batch=4,
    chunk_tokens=128,
    max_context_tokens=512,
    pool_blocks=256,
    shares_decoded=False,
)
STEPS = (
    Measurement("prefill", 0, 16, 0, 0, 0.002),
    Measurement("prefill", 0, 128, 0, 0, 0.003),
    Measurement("prefill", 384, 16, 0, 0, 0.006),
    Measurement("prefill", 384, 128, 0, 0, 0.009),
    Measurement("decode", 0, 0, 1, 0, 0.001),
    Measurement("decode", 0, 0, 1, 500, 0.002),
    Measurement("decode", 0, 0, 4, 0, 0.0015),
    Measurement("decode", 0, 0, 4, 2000, 0.004),
)
MACHINE = Machine(
    hardware="cpu",
    model="builtin-tiny",
    sizes=SIZES,
    steps=STEPS,
    slowdown={"prefill": {"decode": 1.5}, "decode": {"prefill": 1.25}},
    copies=Copies(Line(100, 10), Line(200, 20), Line(50, 5)),
    overheads=Overheads(400, 300, 200, 100, (0.5, 1.0, 4.0)),
    spread={"decode": Spread((0.8, 1.5), (0.9, 1.0, 1.3))},
    notes={"by": "a test"},
)
COST = Measured(MACHINE)


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    write(MACHINE, tmp_path / "m.json")
    assert read(str(tmp_path / "m.json")).machine == MACHINE


def test_measured_points_come_back_and_between_them_lines() -> None:
    assert COST.prefill_ns(0, 128) == 3_000_000
    assert COST.prefill_ns(384, 16) == 6_000_000
    assert COST.prefill_ns(192, 128) == 6_000_000
    assert COST.step_ns(4, 1000, 1).tolist() == [2_750_000]
    assert COST.step_ns(0, 0, 3).tolist() == [0, 0, 0]


def test_a_prompt_costs_its_chunks_and_a_mixed_step_both_parts() -> None:
    chunks = [COST.prefill_ns(64, 128), COST.prefill_ns(192, 128), COST.prefill_ns(320, 50)]
    assert COST.prefill_ns(64, 306) == sum(chunks)
    assert COST.prefill_ns(64, 0) == 0
    assert COST.mixed_ns(64, 128, 2, 100) == COST.prefill_ns(64, 128) + int(COST.step_ns(2, 100, 1)[0])
    assert COST.prefill_s(370, np.array([64, 370])).tolist() == [sum(chunks) / 1e9, 0.0]
    assert COST.decode_s(np.array([4, 0]), np.array([1000, 0])).tolist() == [0.00275, 0.0]


@given(batch=st.integers(1, 8), context=st.integers(0, 3000), steps=st.integers(1, 30))
def test_decode_steps_split_exactly(batch: int, context: int, steps: int) -> None:
    together = COST.step_ns(batch, context, steps)
    assert together.dtype == np.int64
    assert together.tolist() == [int(COST.step_ns(batch, context + batch * j, 1)[0]) for j in range(steps)]


def test_it_is_refused_elsewhere_unless_told() -> None:
    COST.check("cpu", "builtin-tiny")
    with pytest.raises(ConfigError, match="was measured on builtin-tiny"):
        COST.check("cpu", "llama3-8b")
    Measured(MACHINE, allow_mismatch=True).check("h100x8", "llama3-8b")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: None, "no such file; `mcjax validate` measures this machine"),
        (lambda text: text[:-40], "cannot be read"),
        (lambda text: text.replace('"sizes"', '"size"'), "is no file of `mcjax validate`"),
        (lambda text: text.replace('"version": 1', '"version": 7'), "version 7"),
        (lambda text: text.replace('"decode": 1.5', '"decode": 0.5'), "slowdown.prefill.decode is 0.5"),
        (lambda text: "[]", "is no file of `mcjax validate`"),
    ],
)
def test_a_wrong_file_is_named(change: Callable[[str], str | None], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    write(MACHINE, path)
    text = change(path.read_text())
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ConfigError, match=r"cost\.path") as refused:
        read(str(path))
    assert problem in str(refused.value)


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ConfigError, match="need two different batch"):
        Measured(replace(MACHINE, steps=STEPS[:6])).step_ns(1, 0, 1)
