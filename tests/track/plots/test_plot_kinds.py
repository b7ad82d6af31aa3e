"""What is drawn is what the tables say, and the CSV holds what is drawn."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from plots_fixtures import RATE, repeated, run_with

from mcjax.track.plots.drawn import Drawn
from mcjax.track.plots.kinds import KINDS, draw
from mcjax.track.run import Run

TWO = {"random": [(10, 20, 40), (10, 30, 50), (20, 20, 90)], "cache_aware": [(5, 6, 7), (6, 7, 8), (5, 8, 9)]}


def rows(drawn: Drawn, **wanted: str) -> list[dict[str, Any]]:
    """Rows of the saved numbers where these columns hold these texts."""
    found = csv.DictReader(io.StringIO(drawn.csv()))
    return [row for row in found if all(row[column] == text for column, text in wanted.items())]


def column(found: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [float(row[name]) if row[name] else float("nan") for row in found]


def lines(drawn: Drawn, panel: int = 0) -> list[Any]:
    return drawn.figure.axes[panel].get_lines()


def test_a_cdf_is_the_share_of_values_up_to_each() -> None:
    drawn = draw(run_with([10, 20, 20, 40]), "ttft_cdf")
    (line,) = lines(drawn)
    assert line.get_xdata() == pytest.approx([10, 20, 40], rel=2**-9)  # milliseconds
    assert line.get_ydata().tolist() == [0.25, 0.75, 1.0]
    found = rows(drawn)
    assert column(found, "ttft_s") == pytest.approx([0.01, 0.02, 0.04], rel=2**-9)
    assert column(found, "share") == [0.25, 0.75, 1.0]
    assert [row["low"] for row in found] == [""] * 3
    assert "One run a group, so there is no interval" in drawn.note


def test_intervals_between_tokens_are_each_counted() -> None:
    found = rows(draw([run_with([10, 10], interval_ms=5), run_with([10], interval_ms=8, slice_=1)], "tbt_cdf"))
    # Two intervals a request; each run weighs the same, however many requests it had.
    assert column(found, "tbt_s") == pytest.approx([0.005, 0.008], rel=2**-9)
    assert column(found, "share") == [0.5, 1.0]


def test_a_band_holds_the_mean_and_comes_from_the_repetitions() -> None:
    drawn = draw(repeated(TWO), "ttft_cdf")
    found = rows(drawn, group="random")
    x, y, low, high = (np.array(column(found, name)) for name in ("ttft_s", "share", "low", "high"))
    shares = np.array([[np.mean(np.array(run) <= 1e3 * at * (1 + 2**-9)) for at in x] for run in TWO["random"]])
    assert y == pytest.approx(shares.mean(axis=0))
    assert (low <= y).all()
    assert (y <= high).all()
    assert (low >= shares.min(axis=0) - 1e-12).all()
    assert (high <= shares.max(axis=0) + 1e-12).all()
    assert (high - low)[1:-1].max() > 0.1
    assert {row["repetitions"] for row in found} == {"3"}
    assert len(drawn.figure.axes[0].collections) == 2  # a band a group
    assert "3 runs a group" in drawn.note


def test_lost_requests_stand_beside_the_name() -> None:
    runs = [run_with([10] * 3, rejected=1), run_with([10] * 4, prefill="round_robin")]
    drawn = draw(runs, "ttft_cdf")
    (legend,) = drawn.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["random (25.0% lost)", "round_robin"]
    assert legend.get_title().get_text() == "prefill"


def test_requests_of_the_warm_up_are_left_out() -> None:
    assert column(rows(draw(run_with([500, 10], warmup_s=0.05), "ttft_cdf")), "ttft_s") == pytest.approx(
        [0.01], rel=0.01
    )


def test_goodput_bars_and_what_became_of_the_rest() -> None:
    runs = repeated(TWO, rejected=1)
    drawn = draw(runs, "goodput")
    found = rows(drawn)
    by_group = {name: [run for run in runs if run.record.choices["sched/prefill"] == name] for name in TWO}
    for row, (name, members) in zip(found, by_group.items(), strict=True):
        assert row["group"] == name
        assert float(row["goodput_rps"]) == pytest.approx(np.mean([run.summary["goodput_rps"] for run in members]))
        assert float(row["low"]) <= float(row["goodput_rps"]) <= float(row["high"])
        fates = [float(row[fate]) for fate in ("within_SLO", "too_late", "rejected", "failed", "cancelled")]
        assert sum(fates) == pytest.approx(1)
        assert fates[2] == pytest.approx(0.25)
    widths = [bar.get_width() for bar in drawn.figure.axes[0].patches]
    assert widths == pytest.approx(column(found, "goodput_rps"))
    assert {"within SLO", "too late", "rejected"} == {text.get_text() for text in drawn.figure.legends[0].get_texts()}


def swept() -> list[Run]:
    return [
        run_with([10] * count, prefill=name, config={RATE: rate}, slice_=slice_)
        for name, most in (("random", 3), ("cache_aware", 6))
        for count, rate in ((1, 0.5), (2, 1.0), (most, 2.0))
        for slice_ in range(2)
    ]


def test_a_swept_number_becomes_the_axis() -> None:
    drawn = draw(swept(), "goodput")
    assert [panel.get_title(loc="left") for panel in drawn.figure.axes] == [
        "goodput, requests/s",
        "rejected, failed or cancelled",
    ]
    (first, second) = lines(drawn)
    assert first.get_xdata().tolist() == second.get_xdata().tolist() == [0.5, 1.0, 2.0]
    assert first.get_ydata() == pytest.approx([1 / 2, 2 / 3, 3 / 4])
    assert second.get_ydata() == pytest.approx([1 / 2, 2 / 3, 6 / 7])
    found = rows(drawn, figure="goodput", group="cache_aware")
    assert column(found, RATE) == [0.5, 1.0, 2.0]
    assert column(found, "value") == pytest.approx([1 / 2, 2 / 3, 6 / 7])
    assert [row["repetitions"] for row in found] == ["2"] * 3


def test_a_number_that_is_no_sweep_gives_bars() -> None:
    runs = [run_with(prefill=name, config={RATE: rate}) for name, rate in (("a", 1.0), ("b", 2.0), ("c", 4.0))]
    assert [row["group"] for row in rows(draw(runs, "goodput"))] == ["a, 1", "b, 2", "c, 4"]


def test_hit_rate_is_weighted_by_tokens_and_split_by_place() -> None:
    run = run_with([10] * 20, hit_tokens=40)
    found = draw(run, "hit_rate")
    assert column(rows(found, panel="prompt tokens found"), "value") == pytest.approx([0.4] * 2)
    assert column(rows(found, panel="in other nodes"), "value") == pytest.approx([0.1] * 2)
    runs = [run_with(hit_tokens=hits, config={"kvpool.dram_bytes": size}) for hits, size in ((20, 1), (40, 2), (80, 3))]
    over = draw(runs, "hit_rate")
    assert column(rows(over, figure="prompt tokens found"), "value") == pytest.approx([0.2, 0.4, 0.8])
    assert over.figure.axes[-1].get_xlabel() == "dram_bytes"


def test_gauges_are_means_of_their_ticks_between_the_least_and_the_most() -> None:
    drawn = draw(run_with([10] * 3), "queues")
    found = rows(drawn, panel="prompts queued a prefill instance")
    # Ticks of 100 ms: p0 has the tick's number queued, p1 three times as many.
    ticks = np.array(column(found, "time_s")) / 0.1
    assert np.array(column(found, "value")) == pytest.approx(2 * np.floor(ticks), rel=0.2, abs=2.1)
    assert np.array(column(found, "high")) == pytest.approx(3 * np.array(column(found, "low")))
    assert np.array(column(found, "value")) == pytest.approx(2 * np.array(column(found, "low")))
    assert {row["band"] for row in found} == {"least to most of 2"}
    assert set(column(rows(drawn, panel="sequences decoding a decode instance"), "value")) == {2.0}
    assert {row["panel"] for row in rows(drawn)} == {
        "prompts queued a prefill instance",
        "sequences decoding a decode instance",
    }


def test_residency_by_tier_and_role() -> None:
    drawn = draw(run_with([10] * 3), "residency")
    assert [panel.get_title(loc="left") for panel in drawn.figure.axes] == [
        "HBM pages, prefill",
        "HBM pages, decode",
        "DRAM pool, prefill",
        "DRAM pool, decode",
    ]
    assert set(column(rows(drawn, panel="HBM pages, prefill"), "value")) == {0.375}
    pool = column(rows(drawn, panel="DRAM pool, decode"), "value")
    assert pool == sorted(pool)
    assert pool[-1] == pytest.approx(0.4, abs=0.01)


def test_links_carry_what_the_events_say() -> None:
    run = run_with([50] * 4)
    found = rows(draw(run, "links"), way="p0 > d0")
    times = column(found, "time_s")
    moved = sum(column(found, "gb_per_s")) * (times[1] - times[0]) * 1e9
    assert moved == pytest.approx(4 * 64, rel=1e-6)
    rates = column(rows(draw(run, "links"), way="network"), "gb_per_s")
    assert rates == pytest.approx([10] * len(rates))  # 1e9 bytes a tick of 100 ms
    both = draw([run, run_with([50] * 4, slice_=1)], "links")
    assert [panel.get_title(loc="left") for panel in both.figure.axes] == [
        "network, GB/s",
        "network, GB under way or waiting",
    ]
    assert set(column(rows(both, panel="network, GB under way or waiting"), "value")) == {2.0}


def test_the_timeline_is_busy_as_long_as_the_summary_says() -> None:
    run = run_with([30, 60, 20])
    found = rows(draw(run, "timeline"))
    for instance, phase in (("p0", "prefill"), ("d0", "decode")):
        mine = [row for row in found if row["instance"] == instance]
        assert {row["phase"] for row in mine} == {phase}
        busy_s = sum((float(row["end_s"]) - float(row["begin_s"])) * float(row["busy"]) for row in mine)
        assert busy_s == pytest.approx(run.summary[f"{phase}_busy_s"])


def test_load_counts_who_is_there() -> None:
    run = run_with([50] * 5, interval_ms=10, rejected=2)
    drawn = draw(run, "load")
    within = rows(drawn, panel="requests in the system")
    width_s = float(within[1]["time_s"]) - float(within[0]["time_s"])
    assert sum(column(within, "value")) * width_s == pytest.approx(5 * 0.07, rel=1e-6)
    arriving = column(rows(drawn, panel="prompt tokens arriving, 1/s"), "value")
    assert sum(arriving) * width_s == pytest.approx(7 * 100)
    tokens = column(rows(drawn, panel="their tokens"), "value")
    assert np.array(tokens) == pytest.approx(103 * np.array(column(within, "value")))


def test_a_stretch_of_time() -> None:
    times = column(rows(draw(run_with([10] * 8), "load", from_s=2, to_s=5)), "time_s")
    assert 2 < min(times) < max(times) < 5


def test_lines_end_where_half_of_the_repetitions_have() -> None:
    runs = [run_with([10] * count, slice_=count) for count in (2, 2, 9)]
    times = column(rows(draw(runs[1:], "load"), panel="requests in the system"), "time_s")
    assert max(times) == pytest.approx(10, abs=0.2)  # one of two still runs
    runs.append(run_with([10] * 3, slice_=3))
    times = column(rows(draw(runs, "load"), panel="requests in the system"), "time_s")
    assert max(times) == pytest.approx(4, abs=0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_lines_are_those_of_the_csv(kind: str) -> None:
    """Whatever the kind: each drawn y stands in the numbers beside it."""
    drawn = draw(repeated(TWO), kind)
    told = {
        round(value, 9)
        for name in drawn.data.column_names
        for value in drawn.data.column(name).to_pylist()
        if isinstance(value, float)
    }
    assert told
    for panel in drawn.figure.axes:
        for line in panel.get_lines():
            if line.get_color() != "#777777" and len(line.get_ydata()) > 2:  # the front joins points that are there
                assert {round(float(y), 9) for y in line.get_ydata()} <= told
    assert drawn.kind == kind
    assert drawn.data.num_rows > 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_run_has_a_picture_that_says_so(kind: str) -> None:
    drawn = draw(run_with([], samples=False), kind)
    assert drawn.png().startswith(b"\x89PNG")
    assert len(drawn.csv().splitlines()) >= 1


def test_times_are_in_units_that_read_well() -> None:
    assert draw(run_with([10, 20]), "ttft_cdf").figure.axes[0].get_xlabel() == "time to first token, ms"
    assert draw(run_with([1000, 2000]), "ttft_cdf").figure.axes[0].get_xlabel() == "time to first token, s"
