"""Gaps of both families, and rates that swing or burst."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.errors import ConfigError
from mcjax.workload.arrivals import Burst, Diurnal, Modulation, arrivals_ns, modulation, weibull_shape
from mcjax.workload.streams import stream
from mcjax.workload.synthetic import Synthetic


@pytest.mark.parametrize("family", ["gamma", "weibull"])
@pytest.mark.parametrize("cv", [0.3, 1.0, 2.0])
def test_rate_and_burstiness_are_what_was_asked_for(family: str, cv: float) -> None:
    gaps = np.diff(arrivals_ns(stream(3, 0), 40_000, 5.0, cv, family))
    assert gaps.mean() == pytest.approx(0.2e9, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08)


def test_weibull_shapes() -> None:
    assert weibull_shape(1.0) == pytest.approx(1.0)
    assert weibull_shape(5.0**0.5) == pytest.approx(0.5), "a Weibull of shape 1/2 has a variance of 5 squared means"
    for cv in (1e-4, 1e9):
        with pytest.raises(ConfigError, match="arrival_cv"):
            weibull_shape(cv)


def test_a_diurnal_rate_peaks_where_it_should() -> None:
    times_s = arrivals_ns(stream(1, 0), 50_000, 10.0, modulated=Diurnal(0.8, 1000, peak_s=250)) / 1e9
    counts = np.histogram(times_s % 1000, [0, 125, 375, 625, 875])[0] / times_s.max() * 4
    assert times_s.max() == pytest.approx(5000, rel=0.03), "the mean rate is kept over whole periods"
    swing = 0.8 * np.sin(np.pi / 4) / (np.pi / 4)
    assert counts[1] == pytest.approx(10 * (1 + swing), rel=0.05)
    assert counts[3] == pytest.approx(10 * (1 - swing), rel=0.1)


def test_bursts_come_when_they_should() -> None:
    times_s = arrivals_ns(stream(1, 0), 30_000, 10.0, modulated=Burst(5, every_s=100, length_s=10)) / 1e9
    late = times_s[(times_s >= 100) & (times_s < 2000)]
    assert (times_s < 100).sum() == pytest.approx(1000, rel=0.15), "the first burst comes at every_s"
    assert (late % 100 < 10).sum() == pytest.approx(19 * 10 * 50, rel=0.05)
    assert (late % 100 >= 10).sum() == pytest.approx(19 * 90 * 10, rel=0.05)


MODULATIONS = st.builds(Diurnal, st.floats(0, 0.99), st.floats(1e-2, 1e5), st.floats(0, 1e5)) | st.floats(
    1e-2, 1e4
).flatmap(
    lambda every: st.builds(Burst, st.floats(0.01, 100), st.just(every), st.floats(0.01, 0.99).map(lambda x: x * every))
)


@given(MODULATIONS, st.floats(0.01, 1e3), st.integers(1, 40))
@settings(max_examples=60)
def test_modulated_arrivals_ascend_and_keep_the_clock(modulated: Modulation, rate: float, count: int) -> None:
    plain_s = arrivals_ns(stream(9, 0), count, rate) / 1e9
    times_ns = arrivals_ns(stream(9, 0), count, rate, modulated=modulated)
    assert np.all(np.diff(times_ns, prepend=0) >= 0)
    assert modulated.elapsed_s(times_ns / 1e9) == pytest.approx(plain_s, rel=1e-6, abs=count * 2e-4)
    assert np.array_equal(arrivals_ns(stream(9, 0), count + 3, rate, modulated=modulated)[:count], times_ns)


def test_what_is_not_given_changes_nothing_and_mistakes_are_named() -> None:
    assert modulation(None, None) is None
    plain = [session.start_ns for session in Synthetic(1).sessions()]
    assert plain == [session.start_ns for session in Synthetic(1, arrival_family="weibull").sessions()]
    assert plain != [s.start_ns for s in Synthetic(1, burst={"factor": 9, "every_s": 5, "length_s": 1}).sessions()]
    for key, value in {
        "arrival_family": "pareto",
        "diurnal": {"amplitude": 1.0},
        "burst": {"factor": 2, "every_s": 1, "length_s": 1},
    }.items():
        with pytest.raises(ConfigError, match=f"workload.{key}"):
            Synthetic(1, **{key: value})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="allowed: amplitude"):
        modulation({"height": 1.0}, None)
    with pytest.raises(ConfigError, match="superpose"):
        modulation({"amplitude": 0.5}, {"factor": 2, "every_s": 9, "length_s": 1})
