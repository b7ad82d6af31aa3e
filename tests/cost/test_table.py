"""Interpolated measurements: exact where a function is multi-linear, exact under splitting, clear at the edges."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.cost.measurements import Measurement, write_csv
from mcjax.cost.table import Table, read
from mcjax.errors import ConfigError


def chunk_s(start: int, length: int) -> float:
    return 1e-3 + 2e-5 * length + 3e-9 * start * length


def step_s(batch: int, context: float) -> float:
    return 5e-3 + 1e-4 * batch + 4e-8 * batch * context


def mixed_s(start: int, length: int, batch: int, context: float) -> float:
    return 1e-3 + max(chunk_s(start, length), step_s(batch, context))


STARTS, LENGTHS, BATCHES, CONTEXTS = (0, 1000, 8000), (64, 512, 4096), (1, 8, 100), (0, 500, 20_000)
PREFILL = [Measurement("prefill", s, n, 0, 0, chunk_s(s, n)) for s, n in product(STARTS, LENGTHS)]
DECODE = [Measurement("decode", 0, 0, b, b * c, step_s(b, c)) for b, c in product(BATCHES, CONTEXTS)]
MIXED = [
    Measurement("mixed", s, n, b, b * c, mixed_s(s, n, b, c))
    for s, n, b, c in product(STARTS, LENGTHS, BATCHES, CONTEXTS)
]
TABLE = Table(PREFILL + DECODE + MIXED)
RNG = np.random.default_rng(5)
NOISY = Table([Measurement(r.kind, r.start_tokens, r.length_tokens, r.batch, r.context_tokens,
                           r.seconds * float(RNG.uniform(0.5, 2))) for r in PREFILL + DECODE + MIXED])  # fmt: skip


def test_measured_points_come_back() -> None:
    for row in PREFILL:
        assert TABLE.prefill_ns(row.start_tokens, row.length_tokens) == round(row.seconds * 1e9)
    for row in DECODE:
        assert TABLE.step_ns(row.batch, row.context_tokens, 1).tolist() == [round(row.seconds * 1e9)]
    for row in MIXED:
        found = TABLE.mixed_ns(row.start_tokens, row.length_tokens, row.batch, row.context_tokens)
        assert found == pytest.approx(row.seconds * 1e9, abs=1.5)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 100_000), st.integers(64, 50_000), st.integers(1, 500), st.integers(0, 200_000))
def test_a_bilinear_truth_is_found_inside_the_grid_and_beyond_it(start: int, n: int, batch: int, context: int) -> None:
    assert TABLE.prefill_ns(start, n) == pytest.approx(chunk_s(start, n) * 1e9, rel=1e-9, abs=1)
    assert TABLE.step_ns(batch, batch * context, 1)[0] == pytest.approx(step_s(batch, context) * 1e9, rel=1e-9, abs=1)


def test_below_the_grid_the_first_value_counts() -> None:
    assert TABLE.prefill_ns(0, 1) == TABLE.prefill_ns(0, 64)
    assert TABLE.prefill_ns(0, 0) == TABLE.prefill_ns(500, 0) == 0
    late = Table([row for row in PREFILL + DECODE if row.batch != 1])
    assert late.step_ns(2, 1000, 1)[0] == late.step_ns(8, 4000, 1)[0]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([TABLE, NOISY]), st.integers(1, 300), st.integers(0, 4_000_000), st.integers(1, 64), st.data()
)  # fmt: skip
def test_macro_steps_split_exactly(table: Table, batch: int, context: int, steps: int, data: st.DataObject) -> None:
    together = table.step_ns(batch, context, steps)
    assert (together.dtype, together.shape) == (np.int64, (steps,))
    assert (together > 0).all()
    one_by_one = [table.step_ns(batch, context + batch * j, 1)[0] for j in range(steps)]
    np.testing.assert_array_equal(together, one_by_one)
    cut = data.draw(st.integers(0, steps))
    rest = table.step_ns(batch, context + batch * cut, steps - cut)
    np.testing.assert_array_equal(together, np.concatenate([together[:cut], rest]))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 20_000), st.integers(1, 20_000), st.integers(1, 300), st.integers(0, 4_000_000))
def test_one_point_has_the_bits_of_many(start: int, length: int, batch: int, context: int) -> None:
    grid = NOISY._mixed
    assert grid is not None
    mean = context / batch
    alone = grid.one(start, length, batch, mean)
    several = grid.at(np.array([7.0, start]), np.array([9.0, length]), batch, np.array([1.0, mean]))
    assert several[1] == alone
    mixed = NOISY.mixed_ns(start, length, batch, context)
    parts = NOISY.prefill_ns(start, length), int(NOISY.step_ns(batch, context, 1)[0])
    assert mixed == max(round(alone), *parts)


def test_mixed_steps_are_looked_up_and_not_added_up() -> None:
    parts = TABLE.prefill_ns(1000, 512) + int(TABLE.step_ns(8, 4000, 1)[0])
    assert TABLE.mixed_ns(1000, 512, 8, 4000) < 0.9 * parts
    assert TABLE.mixed_ns(1000, 512, 0, 0) == TABLE.prefill_ns(1000, 512)
    assert TABLE.mixed_ns(0, 0, 8, 4000) == TABLE.step_ns(8, 4000, 1)[0]
    assert TABLE.step_ns(0, 0, 3).tolist() == [0, 0, 0]
    without = Table(PREFILL + DECODE)
    assert without.mixed_ns(1000, 512, 0, 0) == TABLE.prefill_ns(1000, 512)
    with pytest.raises(ConfigError, match="no mixed rows"):
        without.mixed_ns(1000, 512, 8, 4000)


def test_lines_may_end_at_different_points() -> None:
    """Memory ends a batch's contexts early: each line goes on as itself."""
    short = [row for row in DECODE if row.batch < 100 or row.context_tokens <= 50_000]
    assert len(short) == len(DECODE) - 1
    table = Table(PREFILL + short)
    for batch, context in ((100, 20_000), (60, 15_000), (8, 20_000), (3, 300)):
        assert table.step_ns(batch, batch * context, 1)[0] == pytest.approx(step_s(batch, context) * 1e9, abs=2)


def test_repeats_count_as_their_median() -> None:
    again = [Measurement("decode", 0, 0, 8, 4000, seconds) for seconds in (9.0, step_s(8, 500) * 1.01)]
    assert Table(PREFILL + DECODE + again).step_ns(8, 4000, 1)[0] == round(step_s(8, 500) * 1.01e9)


def test_vectors_agree_with_nanoseconds() -> None:
    reused = np.array([0, 1, 5000, 9_000, 10_000])
    expected = [NOISY.prefill_ns(int(start), 10_000 - int(start)) / 1e9 for start in reused]
    np.testing.assert_allclose(NOISY.prefill_s(10_000, reused), expected, atol=1e-9)
    batch, context = np.array([0, 1, 9, 250]), np.array([0, 300, 70_000, 9_000_000])
    steps = [int(NOISY.step_ns(int(b), int(c), 1)[0]) / 1e9 for b, c in zip(batch, context, strict=True)]
    np.testing.assert_allclose(NOISY.decode_s(batch, context), steps, atol=1e-9)


def test_rows_that_span_no_grid_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"prefill rows need two different start_tokens; there is 0"):
        Table([row for row in PREFILL if row.start_tokens == 0] + DECODE)
    with pytest.raises(ConfigError, match=r"decode rows need two different batch; there is none"):
        Table(PREFILL)
    with pytest.raises(ConfigError, match=r"start_tokens=1000: prefill rows need two different length_tokens"):
        Table([row for row in PREFILL if row.start_tokens != 1000 or row.length_tokens == 64] + DECODE)
    scattered = [Measurement("decode", 0, 0, b, b * b * c, 1.0) for b, c in product(range(1, 3000), (1, 2))]
    with pytest.raises(ConfigError, match="points of a grid"):
        Table(PREFILL + scattered)


def test_it_is_read_from_a_file_and_checks_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    write_csv(str(path), PREFILL + DECODE, "")
    table = read(str(path), "mine", measured_hardware="h100x8", measured_model="llama3-8b")
    assert table.step_ns(8, 4000, 3).tolist() == TABLE.step_ns(8, 4000, 3).tolist()
    table.check("h100x8", "llama3-8b")
    with pytest.raises(ConfigError, match=r"model=qwen3-32b: cost=mine was measured on llama3-8b"):
        table.check("h100x8", "qwen3-32b")
    read(str(path), measured_hardware="h100x8", allow_mismatch=True).check("a800x8", "any")
    read(str(path)).check("a800x8", "any")
