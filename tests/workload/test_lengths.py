"""Length predictors and arrival processes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.errors import ConfigError
from mcjax.types import NS_PER_S, Request, Script
from mcjax.workload.arrivals import arrivals_ns
from mcjax.workload.base import LengthPredictor
from mcjax.workload.driver import ScriptBook
from mcjax.workload.lengths import Constant, MaxTokens, Oracle, RunningMean
from mcjax.workload.streams import stream
from mcjax.workload.tenants import deal_tenants, parse_tenants


def request(request_id: int = 0, max_tokens: int = 100, tenant: str = "a") -> Request:
    return Request(request_id, 0, 1, max_tokens, tenant=tenant)


def test_constant_and_max_tokens() -> None:
    assert MaxTokens().predict(request(max_tokens=70)) == 70
    assert Constant(30).predict(request()) == 30
    assert Constant(300).predict(request(max_tokens=70)) == 70
    with pytest.raises(ConfigError):
        Constant(0)


def test_running_mean_learns_by_tenant() -> None:
    predictor = RunningMean()
    assert predictor.predict(request(max_tokens=70)) == 70
    predictor.observe(request(tenant="a"), 10)
    predictor.observe(request(tenant="a"), 20)
    predictor.observe(request(tenant="b"), 60)
    assert predictor.predict(request(tenant="a")) == 15
    assert predictor.predict(request(tenant="b")) == 60
    assert predictor.predict(request(tenant="c")) == 30
    assert predictor.predict(request(tenant="b", max_tokens=50)) == 50


def test_oracle_tells_the_truth_within_the_limit() -> None:
    scripts = ScriptBook()
    scripts.put(4, Script(33))
    assert Oracle(scripts).predict(request(4)) == 33
    assert Oracle(scripts).predict(request(4, max_tokens=20)) == 20


def test_every_predictor_has_a_name_for_the_tables() -> None:
    predictors: list[LengthPredictor] = [MaxTokens(), Constant(3), RunningMean(), Oracle(ScriptBook())]
    assert [predictor.name for predictor in predictors] == ["max_tokens", "constant", "running_mean", "oracle"]


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_arrivals_have_the_rate_and_burstiness_asked_for(cv: float) -> None:
    times_ns = arrivals_ns(stream(3, 0), 40_000, 5.0, cv)
    gaps_s = np.diff(times_ns, prepend=0) / NS_PER_S
    assert abs(gaps_s.mean() * 5.0 - 1) < 0.06
    assert abs(gaps_s.std() / gaps_s.mean() - cv) < 0.06 * max(cv, 1)


@given(
    seed=st.integers(0, 2**64 - 1),
    count=st.integers(0, 50),
    rate=st.floats(1e-3, 1e6),
    cv=st.sampled_from([0.0, 1.0, 2.5]),
)
@settings(max_examples=60)
def test_arrivals_ascend_and_do_not_depend_on_the_count(seed: int, count: int, rate: float, cv: float) -> None:
    times_ns = arrivals_ns(stream(seed, 0), count, rate, cv)
    assert times_ns.dtype == np.int64
    assert times_ns.shape == (count,)
    assert np.all(np.diff(times_ns, prepend=0) >= 0)
    assert np.array_equal(arrivals_ns(stream(seed, 0), count + 7, rate, cv)[:count], times_ns)


def test_streams_of_different_paths_differ() -> None:
    paths = [(0,), (1,), (1, 0), (2, 0), (2, 0, 1), (2, 1), (2, 1, 1)]
    draws = {path: stream(9, *path).integers(2**62) for path in paths}
    assert len(set(draws.values())) == len(paths)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any), st.integers(1, 60))
@settings(max_examples=60)
def test_dealt_tenants_keep_their_shares(shares: list[int], count: int) -> None:
    tenants = parse_tenants({f"t{index}": {"share": share} for index, share in enumerate(shares)})
    order = [tenant.name for tenant in deal_tenants(tenants, count)]
    for tenant in tenants:
        exact = tenant.share * count / sum(shares)
        assert abs(order.count(tenant.name) - exact) <= len(tenants)
        assert tenant.share > 0 or tenant.name not in order
