"""Groups against one another: what is paired with what, which differences are believed, and what is said besides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from compare_fixtures import policies, served, summarised, waits_ms

from mcjax.errors import ConfigError, RunError
from mcjax.track.compare.comparison import Comparison, Row, compare
from mcjax.track.run import Run
from mcjax.track.runs import Runs
from mcjax.track.sweep import Point, Sweep

NOISE = np.random.default_rng(5).normal(0, 0.01, 8)
"""What two policies share: the traffic of each seed."""
OWN = np.random.default_rng(6).normal(0, 0.001, (3, 8))
"""What each has by itself."""


def row(comparison: Comparison, name: str, part: str = "") -> Row:
    return next(row for row in comparison.rows if (row.metric.name, row.part) == (name, part))


def best(comparison: Comparison, name: str, part: str = "") -> list[str]:
    cells = zip(comparison.groups, row(comparison, name, part).cells, strict=True)
    return [group.label for group, cell in cells if cell.best]


def said(comparison: Comparison, words: str) -> bool:
    return any(words in note for note in comparison.notes)


def test_the_difference_is_of_pairs() -> None:
    """Traffic varies ten times as much as the policies: only pairs show what they differ by."""
    values = {"a": 1 + NOISE + OWN[0], "b": 1.004 + NOISE + OWN[1]}
    runs = policies(values)
    comparison = compare(runs)
    first, second = row(comparison, "ttft_s.p90").cells
    assert first.difference is None
    assert second.difference is not None
    assert second.difference.interval is not None
    assert (second.difference.way, second.difference.count) == ("pairs", 8)
    assert second.mean == pytest.approx(values["b"].mean())
    assert second.difference.value == pytest.approx((values["b"] - values["a"]).mean())
    assert second.difference.interval.low < 0.004 < second.difference.interval.high
    assert best(comparison, "ttft_s.p90") == ["prefill=a"]
    backwards = compare([*runs[8:], *runs[:8]])
    assert best(backwards, "ttft_s.p90") == ["prefill=a"]
    unpaired = [
        summarised({"sched.prefill": policy}, f"{policy}{seed}", seed, ttft_s={"p90": value})
        for policy, start in (("a", 0), ("b", 100))
        for seed, value in enumerate(values[policy], start)
    ]
    apart = compare(unpaired)
    assert said(apart, "no seed and slice in common")
    assert best(apart, "ttft_s.p90") == []
    away = row(apart, "ttft_s.p90").cells[1].difference
    assert away is not None
    assert (away.way, away.value) == ("unpaired", pytest.approx(second.difference.value))


def test_a_tiny_difference_is_not_marked() -> None:
    assert best(compare(policies({"a": 1 + NOISE + OWN[0], "b": 1.0001 + NOISE + OWN[1]})), "ttft_s.p90") == []


def test_more_is_better_where_it_is() -> None:
    runs = policies({"a": 1 + NOISE, "b": 1.2 + NOISE + OWN[0]}, "prefix_hit_rate", "token")
    assert best(compare(runs), "prefix_hit_rate.token") == ["prefill=b"]
    counts = policies({"a": 1 + NOISE, "b": 1.2 + NOISE + OWN[0]}, "tokens_by_tier", "dram_local")
    assert best(compare(counts, ["tokens_by_tier"]), "tokens_by_tier.dram_local") == []


def test_best_is_better_than_every_other() -> None:
    near = policies({"a": 1 + NOISE + OWN[0], "b": 1.00002 + NOISE + OWN[1], "c": 2 + NOISE + OWN[2]})
    assert best(compare(near), "ttft_s.p90") == []
    apart = policies({"a": 1 + NOISE + OWN[0], "b": 1.1 + NOISE + OWN[1], "c": 2 + NOISE + OWN[2]})
    assert best(compare(apart), "ttft_s.p90") == ["prefill=a"]
    assert said(compare(apart), "97.5 % interval of its difference to each of the 2 others")


def test_few_pairs_mark_nothing() -> None:
    five = compare(policies({"a": 1 + NOISE[:5], "b": 2 + NOISE[:5] + OWN[0, :5]}))
    assert best(five, "ttft_s.p90") == []
    away = row(five, "ttft_s.p90").cells[1].difference
    assert away is not None
    assert away.interval is not None
    assert said(five, "5 pairs are too few to mark anything as best: 6 are needed")
    six = policies({"a": 1 + NOISE[:6], "b": 2 + NOISE[:6] + OWN[0, :6]})
    assert best(compare(six), "ttft_s.p90") == ["prefill=a"]
    # Six against two others: each interval has to hold at 97.5 %, which takes seven.
    three = [*six, *policies({"c": 3 + NOISE[:6] + OWN[1, :6]})]
    assert best(compare(three), "ttft_s.p90") == []
    assert said(compare(three), "7 are needed for 3 groups")


def test_only_what_differs_is_shown() -> None:
    comparison = compare(policies({"a": 1 + NOISE, "b": 2 + NOISE + OWN[0]}))
    assert [row.metric.name for row in comparison.rows] == ["ttft_s.p90"]
    assert {row.metric.name for row in comparison.same} == {
        f"requests.{word}" for word in ("submitted", "completed", "rejected", "failed")
    }
    assert comparison.config == ["sched.prefill"]


@pytest.mark.parametrize("metrics", [None, ["goodput_rps"]])
def test_lost_requests_stand_beside_goodput(metrics: list[str] | None) -> None:
    names = [row.metric.name for row in compare(policies({"a": [1.0] * 6, "b": [2.0] * 6}, "x"), ["x.p90"]).rows]
    assert names == ["x.p90"]
    runs = [
        summarised({"p": policy}, f"{policy}{seed}", seed, goodput_rps=value + seed)
        for policy, value in (("a", 1.0), ("b", 2.0))
        for seed in range(6)
    ]
    shown = [row.metric.name for row in compare(runs, metrics).rows]
    at = shown.index("goodput_rps")
    assert shown[at + 1 : at + 4] == ["requests.completed", "requests.rejected", "requests.failed"]


def test_another_baseline() -> None:
    runs = policies({"a": 1 + NOISE, "b": 2 + NOISE, "c": 3 + NOISE})
    for name in ("3", 3, "prefill=c", "c"):
        comparison = compare(runs, baseline=name)
        cells = row(comparison, "ttft_s.p90").cells
        assert [cell.difference and round(cell.difference.value, 9) for cell in cells] == [-2, -1, None]
    with pytest.raises(ConfigError, match=r"names 0 groups; allowed: 1 \(prefill=a\), 2"):
        compare(runs, baseline="4")


def test_missing_pairs_are_said() -> None:
    runs = policies({"a": 1 + NOISE, "b": 2 + NOISE + OWN[0]})
    comparison = compare(runs[:-1])
    away = row(comparison, "ttft_s.p90").cells[1].difference
    assert away is not None
    assert away.count == 7
    assert said(comparison, "7 pairs of seed and slice (7 in common of 8 and 7)")
    lacking = [*runs[:-1], summarised({"sched.prefill": "b"}, "x", 7, ttft_s={"p90": None})]
    away = row(compare(lacking), "ttft_s.p90").cells[1].difference
    assert away is not None
    assert away.count == 7


def test_seeds_that_change_nothing_count_as_one() -> None:
    """Ten seeds of deterministic policies on one trace are one run, and resampled as one."""
    slow, quick = (
        served([wait * share for wait in waits_ms(300, 20, 3)], name) for name, share in (("a", 2), ("b", 1))
    )
    runs = [again(run, seed) for run in (slow, quick) for seed in range(10)]
    comparison = compare(runs, ["ttft_s.mean"])
    away = row(comparison, "ttft_s.mean").cells[1].difference
    assert away is not None
    assert away.way == "blocks"
    assert said(comparison, "seeds change nothing in all groups: a deterministic policy on one trace has no variance")
    assert said(comparison, "+slices=8")
    assert best(comparison, "ttft_s.mean") == ["prefill=b"]


def test_seeds_that_change_nothing_in_slices() -> None:
    """Eight slices of three equal seeds are eight pairs, not twenty-four."""
    runs = [
        summarised({"p": policy}, f"{policy}{slice_}", seed, slice_, ttft_s={"p90": value + NOISE[slice_] + own})
        for policy, value, noise in (("a", 1.0, OWN[0]), ("b", 1.1, OWN[1]))
        for slice_, own in enumerate(noise)
        for seed in range(3)
    ]
    away = row(compare(runs), "ttft_s.p90").cells[1].difference
    assert away is not None
    assert (away.way, away.count) == ("pairs", 8)


def again(run: Run, seed: int, slice_: int = 0, digest: str = "") -> Run:
    """The same under another seed or slice, or another run with these requests."""
    config = {**run.record.config, "seed": seed, "slice": slice_}
    summary = {**run.summary, "seed": seed, **({"digest": digest} if digest else {})}
    return Run(None, summary, {}, run.tables, record=type(run.record)(config=config))


def test_chance_on_one_trace_is_not_chance_of_traffic() -> None:
    means = (("a", 20), ("b", 5))
    runs = [again(served(waits_ms(40, wait, seed), name), seed) for name, wait in means for seed in range(6)]
    one = compare(runs, ["ttft_s.mean"])
    assert said(one, "all seeds of prefill=a; prefill=b met the same traffic")
    sliced = [
        again(served(waits_ms(40, wait, 10 * seed + slice_), name), seed, slice_)
        for name, wait in means
        for seed in range(2)
        for slice_ in range(6)
    ]
    several = compare(sliced, ["ttft_s.mean"])
    away = row(several, "ttft_s.mean").cells[1].difference
    assert away is not None
    assert away.count == 6
    assert said(several, "seeds of one slice met the same traffic: their mean counts as one")
    values = [np.mean([run.summary["ttft_s"]["mean"] for run in sliced[start : start + 12]]) for start in (0, 12)]
    assert away.value == pytest.approx(values[1] - values[0])


def test_one_run_each_is_resampled_over_time() -> None:
    waits = np.array(waits_ms(500, 20, 1))
    first, second = served(waits.tolist(), "a"), served((waits * 0.8).tolist(), "b")
    comparison = compare([first, second], ["ttft_s", "goodput_rps", "prefill_busy_s", "duration_s"])
    for name in ("ttft_s.mean", "ttft_s.p50", "ttft_s.p90", "goodput_rps"):
        assert best(comparison, name) == ["prefill=b"]
        away = row(comparison, name).cells[1].difference
        assert away is not None
        assert away.interval is not None
        assert away.interval.low < away.value < away.interval.high
    assert said(comparison, "one run a group: 50 blocks")
    assert said(comparison, "no interval of prefill busy, duration: cannot be computed again from requests")
    # The same traffic is drawn together: most of what varies between blocks drops out.
    mean = row(comparison, "ttft_s.mean").cells[1].difference
    shifted = served((waits * 0.8).tolist(), "b", arrivals_ms=[10.0 * index + 0.5 for index in range(500)])
    apart = compare([first, shifted], ["ttft_s.mean"])
    assert said(apart, "since the two met different traffic")
    alone = row(apart, "ttft_s.mean").cells[1].difference
    assert mean is not None
    assert alone is not None
    assert mean.interval is not None
    assert alone.interval is not None
    assert alone.interval.high - alone.interval.low > 2 * (mean.interval.high - mean.interval.low)


def test_a_rate_over_unequal_windows_is_not_certain() -> None:
    """Equal counts, and one run ended later: seen once, that proves nothing."""
    waits = waits_ms(300, 10, 1)
    first, second = served(waits, "a"), served(waits, "b")
    longer = Run(
        None, {**second.summary, "window_s": 2 * second.summary["window_s"]}, {}, second.tables, record=second.record
    )
    longer.summary["goodput_rps"] /= 2
    comparison = compare([first, longer], ["goodput_rps"])
    assert best(comparison, "goodput_rps") == []
    away = row(comparison, "goodput_rps").cells[1].difference
    assert away is not None
    assert away.value < 0
    assert away.interval is not None
    assert away.interval.high == 0


def test_too_few_requests_have_no_interval() -> None:
    unkept = policies({"a": [1.0], "b": [2.0]})
    assert said(compare(unkept), "one run a group: their requests were not kept")
    with pytest.raises(RunError, match="its requests were not kept, and tenant is theirs"):
        compare(unkept, by="tenant")
    comparison = compare([served(waits_ms(60, 20, 1), "a"), served(waits_ms(60, 5, 1), "b")])
    assert said(comparison, "60 requests are too few to resample (100 are needed)")
    assert all(not cell.best for row in comparison.rows for cell in row.cells)


def test_by_tenant() -> None:
    runs = [served(waits_ms(60, wait, seed), name, seed) for name, wait in (("a", 20), ("b", 5)) for seed in range(6)]
    comparison = compare(runs, by="tenant")
    assert {row.part for row in comparison.rows} == {"a", "b"}
    assert best(comparison, "ttft_s.mean", "a") == best(comparison, "ttft_s.mean", "b") == ["prefill=b"]
    cells = row(comparison, "ttft_s.mean", "b").cells
    frame = [run.requests.to_pandas().query("tenant == 'b'")["ttft_ns"].mean() / 1e9 for run in runs]
    assert [cell.mean for cell in cells] == pytest.approx([np.mean(frame[:6]), np.mean(frame[6:])])
    with pytest.raises(ConfigError, match="prefill_busy_s: cannot be told apart by tenant"):
        compare(runs, ["prefill_busy_s"], by="tenant")
    with pytest.raises(ConfigError, match=r"no column of requests.parquet that holds words; allowed: tenant"):
        compare(runs, by="arrival_ns")


def test_unknown_figures_are_answered_with_near_ones() -> None:
    runs = policies({"a": [1.0], "b": [2.0]})
    with pytest.raises(ConfigError, match=r"summary.json has no such figure, did you mean ttft_s.p90"):
        compare(runs, ["ttft_s.p9"])
    assert next(row.metric.name for row in compare(runs, ["requests"]).rows) == "requests.submitted"
    strange = policies({"a": [1.0] * 6, "b": [2.0] * 6}, "bytes_by_transport", "rdma.x")
    assert [row.metric.name for row in compare(strange, ["bytes_by_transport"]).rows] == ["bytes_by_transport.rdma.x"]


def test_what_is_refused_is_listed() -> None:
    runs = policies({"a": [1.0] * 6, "b": [2.0] * 6})
    early = Run(None, runs[0].summary, {}, {}, "failed", "interrupted", runs[0].record)
    points = [Point(("seed=1",), state="done"), Point(("seed=2",), state="failed", reason="out of memory")]
    sweep = Sweep(Path("runs/sweeps/mine"), points=points)
    comparison = compare(Runs([early, *runs], [("runs/x", "runs/x: unfinished")], sweep))
    assert comparison.refused == [
        ("runs/x", "runs/x: unfinished"),
        ("seed=2", "failed in mine out of memory"),
        ("a run in memory", "failed: interrupted (--partial takes it)"),
    ]
    assert not compare(runs).refused
    with pytest.raises(RunError, match="no run to compare\n  a run in memory: failed: interrupted"):
        compare([early])
    taken = compare([early], partial=True)
    assert said(taken, "ended early, and taken all the same")
    assert said(taken, "one group only")


def test_repeated_runs_and_other_code_are_said() -> None:
    runs = policies({"a": [1.0] * 6, "b": [2.0] * 6})
    assert said(compare([*runs, runs[0]]), "1 runs repeat the config, seed and slice of a later one")
    newer = Run(None, runs[0].summary, {}, {}, record=type(runs[0].record)(config=runs[0].record.config, code="new"))
    assert said(compare([newer, *runs[1:]]), "different versions of the code")


def test_equal_arguments_give_equal_intervals() -> None:
    runs = policies({"a": 1 + NOISE, "b": 1.004 + NOISE + OWN[0]})
    assert compare(runs).records() == compare(runs).records()
    assert compare(runs).records() != compare(runs, seed=1).records()
    with pytest.raises(ConfigError, match="resamples"):
        compare(runs, resamples=0)


def test_tidy_records_and_frame() -> None:
    comparison = compare(policies({"a": 1 + NOISE, "b": 2 + NOISE + OWN[0]}))
    frame = comparison.frame
    assert list(frame["sched.prefill"]) == ["a", "b"] * 5
    (marked,) = frame[frame["best"]].to_dict("records")
    assert (marked["metric"], marked["group"], marked["runs"]) == ("ttft_s.p90", "prefill=a", 8)
    other = frame[frame["low"].notna() & (frame["metric"] == "ttft_s.p90")].iloc[0]
    assert other["low"] <= other["difference"] <= other["high"]


@pytest.mark.check_long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("groups", "pairs"), [(2, 6), (2, 10), (3, 8), (5, 8)])
def test_marks_at_length(groups: int, pairs: int) -> None:
    """Of equal policies one is marked in at most the stated share of comparisons; of a better one, more the better."""
    rng = np.random.default_rng(groups * pairs)
    trials = 250

    def marked(effect: float) -> float:
        count = 0
        for _ in range(trials):
            shared, own = rng.normal(size=pairs), rng.normal(size=(groups, pairs))
            own[-1] -= effect
            found = compare(policies({f"p{index}": shared + own[index] for index in range(groups)}), resamples=1000)
            count += any(cell.best for cell in row(found, "ttft_s.p90").cells)
        return count / trials

    rates = [marked(effect) for effect in (0.0, 1.0, 2.0, 8.0)]
    assert rates[0] < 0.05 + 0.045  # three standard errors of 250 trials
    assert rates == sorted(rates)
    assert rates[-1] > 0.9
