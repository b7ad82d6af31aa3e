"""The tools behind the kinds: curves, bands, fronts, bins, labels."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plots_fixtures import RATE, repeated, run_with

from mcjax.errors import ConfigError, RunError
from mcjax.track.metrics import metric
from mcjax.track.plots.bands import band, scalar_band
from mcjax.track.plots.curves import CURVE_POINTS, curve
from mcjax.track.plots.kinds import KINDS, draw
from mcjax.track.plots.over_time import present
from mcjax.track.plots.pareto import front
from mcjax.track.plots.style import LOOKS, styled
from mcjax.track.run import Run
from mcjax.track.runs import Runs
from mcjax.track.sweep import Point, Sweep

TTFT, TBT, GOODPUT = metric("ttft_s.p90"), metric("tbt_s.p90"), metric("goodput_rps")
STEP = 2.0**-10
"""How far apart two values may be and still be one point of a curve, as a share."""


@given(st.lists(st.integers(0, 10**13), min_size=1, max_size=200))
def test_a_curve_is_right_within_a_thousandth_of_the_value(values: list[int]) -> None:
    array = np.array(values, np.int64)
    x, shares = curve([array[:50], array[50:]])
    assert (np.diff(x) > 0).all()
    assert (np.diff(shares) > 0).all()
    assert shares[-1] == 1
    for at, share in zip(x, shares, strict=True):
        assert np.mean(array < at) <= share <= np.mean(array <= at * (1 + STEP) + 1)


def test_a_curve_of_a_million_values_has_few_points() -> None:
    x, shares = curve([np.random.default_rng(0).integers(1, 10**10, 1_000_000)])
    assert len(x) <= CURVE_POINTS
    assert np.interp(5e9, x, shares) == pytest.approx(0.5, abs=0.005)


@given(st.integers(2, 12), st.integers(0, 1000))
def test_a_band_lies_around_the_mean_and_within_the_values(count: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=(count, 5))
    mean, low, high = band(values)
    assert mean == pytest.approx(values.mean(axis=0))
    ends = [values.min(axis=0) - 1e-12, low, mean, high, values.max(axis=0) + 1e-12]
    assert all((one <= other).all() for one, other in pairwise(ends))


@pytest.mark.parametrize(("count", "least"), [(5, 0.9), (10, 0.93), (30, 0.93)])
def test_a_band_covers_the_truth_about_as_often_as_it_says(count: int, least: float) -> None:
    _, low, high = band(np.random.default_rng(1).normal(size=(count, 1000)))
    assert least <= np.mean((low <= 0) & (high >= 0)) <= 0.98


def test_one_repetition_and_missing_values_have_no_band() -> None:
    assert np.isnan(scalar_band([3.0])[1])
    assert scalar_band([2.0, None, 4.0])[0] == 3.0
    mean, low, _ = band(np.array([[1.0, np.nan, np.nan], [3.0, 5.0, np.nan]]))
    assert mean[:2].tolist() == [2.0, 5.0]
    assert np.isnan(mean[2])
    assert np.isfinite(low[0])
    assert np.isnan(low[1:]).all()


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=15), st.booleans())
def test_the_front_is_what_nobody_beats(points: list[tuple[int, int]], upward: bool) -> None:
    x, y = np.array(points, np.float64).T
    sign = -1 if upward else 1
    found = front(x, y, TTFT, GOODPUT if upward else TBT)
    for index, (px, py) in enumerate(points):
        beaten = any(qx <= px and sign * qy <= sign * py and (qx < px or sign * qy < sign * py) for qx, qy in points)
        assert found[index] == (not beaten)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 50), st.integers(1, 9)), max_size=20))
def test_presence_is_the_mean_over_time(intervals: list[tuple[int, int, int]]) -> None:
    begin, took, weight = (
        np.array(column, np.int64) for column in (zip(*intervals, strict=True) if intervals else ([], [], []))
    )
    found = present(begin, begin + took, weight, np.arange(0, 161, 10))
    exact = np.zeros(160)
    for start, length, heavy in intervals:
        exact[start : start + length] += heavy
    assert found == pytest.approx(exact.reshape(16, 10).mean(axis=1))


def test_more_groups_than_lines_are_cut_and_said() -> None:
    runs = [run_with(prefill=f"policy{index}") for index in range(30)]
    drawn = draw(runs, "ttft_cdf")
    (legend,) = drawn.figure.legends
    assert "(the first 8 of 30 groups)" in legend.get_title().get_text().replace("\n", " ")
    assert len(legend.get_texts()) == 8
    assert len({str(line.get_linestyle()) + line.get_color() for line in drawn.figure.axes[0].get_lines()}) == 8


def test_looks_differ_in_colour_line_and_marker() -> None:
    for part in (lambda look: look.colour, lambda look: str(look.line), lambda look: look.marker):
        assert len({part(look) for look in LOOKS}) == len(LOOKS) == 8


def test_pareto_names_every_point_without_hiding_one() -> None:
    runs = [run_with([10 + index // 2, 20, 30 + index], prefill=f"a_long_name_{index}") for index in range(12)]
    drawn = draw(runs, "pareto")
    drawn.png()
    named = [text.get_text() for text in drawn.figure.axes[0].texts]
    explained = [text.get_text() for legend in drawn.figure.legends for text in legend.get_texts()]
    for index in range(12):
        name = f"a_long_name_{index}"
        assert name in named or any(line.endswith(f"  {name}") and line.split()[0] in named for line in explained)
    renderer = drawn.figure.canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in drawn.figure.axes[0].texts if text.get_text() in named[:-1]]
    names = [box for box, text in zip(boxes, drawn.figure.axes[0].texts, strict=False) if len(text.get_text()) > 2]
    assert not any(one.overlaps(other) for at, one in enumerate(names) for other in names[:at])
    assert sum(drawn.data.column("on_front").to_pylist()) >= 1


def test_pareto_of_other_metrics() -> None:
    runs = [run_with([10] * count, prefill=f"p{count}") for count in (1, 3)]
    drawn = draw(runs, "pareto", x="output_tokens_per_s", y="goodput_rps")
    assert drawn.data.column_names[:3] == ["group", "output_tokens_per_s", "output_tokens_per_s.low"]
    assert drawn.data.column("on_front").to_pylist() == [False, True]
    with pytest.raises(ConfigError, match=r"x=ttft_s.p95: no such metric, did you mean ttft_s.p9"):
        draw(runs, "pareto", x="ttft_s.p95")


def test_pareto_is_in_milliseconds_where_seconds_would_be_fractions() -> None:
    drawn = draw([run_with([2000, 3000], interval_ms=5)], "pareto")
    (panel,) = drawn.figure.axes
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("TTFT p90, s", "TBT p90, ms")
    (point,) = panel.get_lines()
    assert (point.get_xdata()[0], point.get_ydata()[0]) == pytest.approx((2.9, 5))
    assert drawn.data.column("tbt_s.p90").to_pylist() == pytest.approx([0.005])


def test_what_is_asked_wrongly_is_answered_with_what_was_meant() -> None:
    run = run_with()
    for options, words in (
        ({"kind": "ttft_cfd"}, "kind=ttft_cfd: no such kind, did you mean ttft_cdf; allowed: ttft_cdf, tbt_cdf"),
        ({"kind": "load", "form_s": 3}, "form_s=3: kind=load takes no form_s, did you mean from_s"),
        ({"kind": "pareto", "from_s": 3}, "kind=pareto takes no from_s"),
        ({"kind": "load", "from_s": "soon"}, "from_s=soon: must be 0 or more seconds"),
        ({"kind": "load", "from_s": 900}, "from_s=900"),
        ({"kind": "load", "width": "wide"}, "width=wide: unknown width; allowed: column, page"),
    ):
        with pytest.raises(ConfigError) as refused:
            draw(run, **options)
        assert words in str(refused.value)
    with pytest.raises(
        ConfigError, match=r"x=rate: no number of this name differs between these runs; allowed: .*rate_per_s"
    ):
        draw([run_with(config={RATE: rate}) for rate in (1, 2, 3)], "goodput", x="rate")


def test_runs_that_are_missing_are_counted_in_the_note() -> None:
    sweep = Sweep(Path("runs/sweeps/s"), points=[Point(("a=1",), state="failed", reason="broke"), Point(("a=2",))])
    runs = Runs([run_with(), run_with(state="failed", slice_=1)], [("runs/x", "was killed")], sweep)
    drawn = runs.plot("ttft_cdf")
    assert drawn.missing == [
        "1 run that ended early",
        "1 run that could not be read",
        "2 points of the sweep that did not finish",
    ]
    assert f"Not among them: {', '.join(drawn.missing)}." in drawn.note
    with pytest.raises(RunError, match="no finished run to draw; it ended early: killed"):
        draw(run_with(state="failed"), "ttft_cdf")


@pytest.mark.parametrize(
    "kind", ["ttft_cdf", "tbt_cdf", "hit_rate", "residency", "queues", "links", "timeline", "load"]
)
def test_runs_that_kept_only_figures_say_which_level_is_needed(kind: str) -> None:
    run = run_with()
    bare = Run(None, {**run.summary, "level": "summary"}, run.config, {}, record=run.record)
    with pytest.raises(RunError, match=r"kept at track.level=summary.*run it again with track.level=requests"):
        draw(bare, kind)


def test_ways_of_transfers_need_every_event() -> None:
    run = run_with(level="requests")
    problem = r"kind=links is drawn from the events of transfers.*run it again with track.level=full"
    with pytest.raises(RunError, match=problem):
        draw(run, "links")
    both = draw([run, run_with(level="requests", slice_=1)], "links")  # whose rates are sampled
    assert both.data.num_rows > 0
    for kind in ("ttft_cdf", "tbt_cdf", "hit_rate", "residency", "queues", "timeline", "load"):
        assert draw(run, kind).data.num_rows > 0


def test_figures_of_whole_runs_need_no_tables() -> None:
    run = run_with()
    bare = Run(None, {**run.summary, "level": "summary"}, run.config, {}, record=run.record)
    assert draw(bare, "goodput").data.column("goodput_rps").to_pylist() == [run.summary["goodput_rps"]]
    assert draw(bare, "pareto").data.num_rows == 1


def test_the_style_touches_nobody_elses_settings() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    matplotlib.rcParams["font.size"] = 31.0
    try:
        drawn = draw(repeated({"a": [(10,)], "b": [(20,)]}), "ttft_cdf", title="Costs $5 and _more_")
        drawn.png()
        with styled():
            assert matplotlib.rcParams["pdf.fonttype"] == 42
        assert matplotlib.rcParams["font.size"] == 31.0
    finally:
        matplotlib.rcParams["font.size"] = before["font.size"]
    assert dict(matplotlib.rcParams) == before
    assert {text.get_fontsize() for text in drawn.figure.legends[0].get_texts()} == {7.0}


def test_no_window_no_list_of_figures() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from plots_fixtures import run_with\n"
        "from mcjax.track.plots.kinds import draw\n"
        "[draw(run_with(), kind)._repr_png_() for kind in ('ttft_cdf', 'pareto', 'links')]\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    folder = str(Path(__file__).parent)
    found = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False", found.stderr


def test_modules_of_kinds_bring_no_heavy_libraries() -> None:
    heavy = {"pyarrow", "pandas", "rich", "matplotlib", "jax", "yaml", "jinja2"}
    code = f"import sys, mcjax.track.plots.kinds, mcjax.track.report.page; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_kind_is_named_and_explained() -> None:
    assert list(KINDS) == "ttft_cdf tbt_cdf goodput pareto hit_rate residency queues links timeline load".split()
    assert all(kind.title and kind.note.endswith(".") for kind in KINDS.values())
