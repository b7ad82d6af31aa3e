"""Errors by regime: each row in the regimes that it belongs to, mean and largest by hand."""

from __future__ import annotations

import pytest

from mcjax.cost.catalogue import fitted
from mcjax.cost.measurements import Measurement
from mcjax.cost.regimes import errors_by_regime, predicted_s

COST = fitted()


def off_by(factor: float, row: Measurement) -> Measurement:
    """A row that the model misses by so much."""
    seconds = predicted_s(COST, row) / factor
    return Measurement(row.kind, row.start_tokens, row.length_tokens, row.batch, row.context_tokens, seconds)


def test_rows_count_where_they_belong() -> None:
    rows = [
        off_by(1.1, Measurement("prefill", 0, 2048, 0, 0, 1)),
        off_by(0.8, Measurement("prefill", 4096, 1024, 0, 0, 1)),
        off_by(1.05, Measurement("prefill", 0, 2049, 0, 0, 1)),
        off_by(0.9, Measurement("decode", 0, 0, 8, 8 * 4096, 1)),
        off_by(1.3, Measurement("decode", 0, 0, 9, 9 * 4096 + 1, 1)),
        off_by(2.0, Measurement("mixed", 0, 512, 4, 900, 1)),
    ]
    found = {error.regime: (error.rows, error.mean, error.largest) for error in errors_by_regime(COST, rows)}
    expected = {
        "prefill, up to 2048 tokens": (2, 0.15, 0.2),
        "prefill, over 2048 tokens": (1, 0.05, 0.05),
        "prefill after a cached prefix": (1, 0.2, 0.2),
        "decode, batch up to 8": (1, 0.1, 0.1),
        "decode, batch over 8": (1, 0.3, 0.3),
        "decode, up to 4096 tokens a sequence": (1, 0.1, 0.1),
        "decode, over 4096 tokens a sequence": (1, 0.3, 0.3),
        "mixed": (1, 1.0, 1.0),
    }
    assert list(found) == list(expected)
    for regime, values in expected.items():
        assert found[regime] == pytest.approx(values), regime


def test_regimes_without_rows_are_left_out() -> None:
    assert [error.regime for error in errors_by_regime(COST, [Measurement("mixed", 0, 512, 4, 900, 1)])] == ["mixed"]
