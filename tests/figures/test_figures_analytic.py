"""A1, A4 to A7, A13, the bars of Fig 14, half of A9: what follows from formulas, the fit and the traces' columns."""

from __future__ import annotations

import pytest

from mcjax.app.figures import analytic
from mcjax.app.figures.row import Row


def errors(rows: list[Row]) -> dict[str, float]:
    return {row.what: row.error for row in rows}


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_a1_trace_table_is_exact(name, trace_rows) -> None:
    rows = analytic.trace_rows(name, trace_rows[name])
    assert [row.ours for row in rows] == [row.published for row in rows]


def test_a4_kv_bytes_are_exact() -> None:
    token, prompt, terabyte = analytic.kv_rows()
    assert (token.ours, prompt.ours) == (320, 40)
    assert round(terabyte.ours, 2) == 3.05  # "about 3 M"


def test_a5_break_even_bandwidth() -> None:
    found = errors(analytic.break_even_rows())
    assert max(map(abs, found.values())) < 0.03, found


def test_a6_prefill_times() -> None:
    found = errors(analytic.prefill_rows())
    assert len(found) == 5
    assert max(map(abs, found.values())) < 0.015, found


def test_a7_prefill_without_cache_on_the_conversation_trace(trace_rows) -> None:
    """Nothing was fitted to this figure: it is a prediction of A6's curve."""
    assert abs(analytic.no_cache_row("conversation", trace_rows["conversation"]).error) < 0.01


def test_a9_prefill_without_cache_on_the_synthetic_trace(trace_rows) -> None:
    assert abs(analytic.no_cache_row("synthetic", trace_rows["synthetic"]).error) < 0.08


def test_a13_transfer_curve() -> None:
    """The fits' rates at 40 GB come within 5 % of the printed ones; our links have the printed ones.

    The curves themselves are not straight: at 80 GB the one of 4 x 200 Gbps is 12 % above the line of the others.
    """
    found = errors(analytic.transfer_rows())
    fits = {what: error for what, error in found.items() if "fit" in what}
    links = {what: error for what, error in found.items() if "link" in what}
    assert len(fits) == len(links) == 2
    assert max(map(abs, fits.values())) < 0.05, fits
    assert max(map(abs, links.values())) < 0.001, links


def test_fig14_bars_without_cache() -> None:
    """Whole bars, prefill and decode within 10 %; transfer and load within 11 %.

    The latter is the paper against itself: 87 GB/s and the 128 GB/s to the device that it models take 10.6 % less than
    its bars show, which fit a load at about 100 GB/s.
    """
    rows = [row for row in analytic.bar_rows() if "no cache" in row.what]
    assert len(rows) == 20
    for row in rows:
        assert abs(row.error) < (0.11 if "transfer" in row.what else 0.10), row
        if "whole" in row.what:
            assert abs(row.error) < 0.01, row
    nbytes = 131_072 * 327_680
    longest = next(row for row in rows if row.what == "128k, no cache: transfer and load")
    assert nbytes / (longest.published - nbytes / 87e9) == pytest.approx(100e9, rel=0.03)


def test_fig14_bars_with_95_percent_cached_do_not_come_out() -> None:
    """Reported, not promised: 16 % to 62 % low, least for the longest prompt, where fixed costs matter least.

    Loading the cached KV at 128 GB/s explains some of it; what is left at 8k, 63 ms, is a floor that the fit lacks.
    """
    found = [row.error for row in analytic.bar_rows() if "cached" in row.what]
    assert found == sorted(found)
    assert found[0] == pytest.approx(-0.617, abs=0.01)
    assert found[-1] == pytest.approx(-0.160, abs=0.01)
    first = next(row for row in analytic.bar_rows() if "8k, 95 % cached" in row.what)
    load_s = 8192 * 95 // 100 * 327_680 / 128e9
    assert first.published - first.ours - load_s == pytest.approx(0.063, abs=0.002)
