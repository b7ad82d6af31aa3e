"""Macro-steps are a way to simulate faster, not a second scheduler: step by step, all happens at the same times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from engine_fixtures import Rows, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.engine.decoder import Preemption
from mcjax.sched.admission.early_rejection import EarlyRejection
from mcjax.types import SLO
from mcjax.workload.synthetic import Synthetic

TENANTS: Mapping[str, Mapping[str, Any]] = {
    "a": {"share": 0.6, "priority": 1, "system_prompt_tokens": 300},
    "b": {"share": 0.4, "priority": 0, "system_prompt_tokens": 900},
}


def workload(seed: int, rate_per_s: float) -> Synthetic:
    return Synthetic(
        seed=seed,
        sessions=25,
        tenants=TENANTS,
        turns=(1, 3),
        first_prompt_tokens=(200, 6000),
        user_tokens=(20, 400),
        output_tokens=(1, 60),
        max_tokens=64,
        rate_per_s=rate_per_s,
        think_time_s=0.5,
    )


def ends(rows: Rows) -> dict[int, list[int]]:
    return {row.request.request_id: np.concatenate(row.token_ends_ns).tolist() for row in rows.requests}


CASES = pytest.mark.parametrize(("seed", "rate_per_s"), [(1, 2.0), (2, 8.0), (3, 4.0)])


def both(cluster: str, seed: int, rate_per_s: float) -> tuple[Rows, Rows]:
    """The same traffic with macro-steps as long as they may be, and step by step."""
    free, single = (simulate(workload(seed, rate_per_s), cluster, max_steps) for max_steps in (None, 1))
    few, many = (sum(event[1] == "decode_step" for event in rows.events) for rows in (free, single))
    assert few < many, "or there was nothing to compare"
    return free, single


@pytest.mark.parametrize("cluster", ["1p1d", "2p1d", "2m"])
@CASES
def test_token_times_and_choices_do_not_depend_on_macro_steps(cluster: str, seed: int, rate_per_s: float) -> None:
    free, single = both(cluster, seed, rate_per_s)
    assert ends(free) == ends(single)
    assert [row[:6] for row in free.decided()] == [row[:6] for row in single.decided()]


@pytest.mark.parametrize("cluster", ["1p1d", "2p2d", "3p2d", "2m"])
@CASES
def test_estimates_do_not_depend_on_macro_steps(cluster: str, seed: int, rate_per_s: float) -> None:
    """Reports are as of their tick, however the world got there (design, rule 7)."""
    free, single = both(cluster, seed, rate_per_s)
    assert ends(free) == ends(single)
    assert free.decided() == single.decided()


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["1p1d", "2p2d", "2m", "1p1d+1m"]),
    st.integers(0, 1000),
    st.sampled_from([4.0, 12.0, 40.0]),
    st.sampled_from([0.2305, 0.232, 0.9]),
    st.sampled_from([None, 1, 16]),
    st.sampled_from([None, 2_000_000_000]),
    st.sampled_from([None, SLO(1.0, 0.05), SLO(4.0, 0.2)]),
    st.dictionaries(st.integers(0, 19).map(lambda session: 1000 * session), st.floats(0.0, 6.0), max_size=6),
    st.sampled_from(["swap", "recompute"]),
    st.booleans(),
)
def test_macro_steps_change_nothing_whatever_happens(
    cluster: str,
    seed: int,
    rate_per_s: float,
    memory_share: float,
    headroom_tokens: int | None,
    pool_bytes: int | None,
    slo: SLO | None,
    patience_s: dict[int, float],
    preemption: Preemption,
    hbm_cache: bool,
) -> None:
    """Preemption, swap, prompts computed again, chunks that ride along, rejections, cancels, early ends; blocks that
    stay on the device."""

    def play(max_steps: int | None) -> Rows:
        traffic = Synthetic(
            seed=seed,
            sessions=20,
            turns=(1, 2),
            first_prompt_tokens=(200, 1500),
            output_tokens=(1, 120),
            max_tokens=150,
            rate_per_s=rate_per_s,
            think_time_s=0.2,
        )
        return simulate(
            traffic,
            cluster,
            max_steps,
            1024,
            memory_share,
            headroom_tokens,
            pool_bytes,
            None if slo is None else EarlyRejection(),
            slo or SLO(float("inf"), float("inf")),
            patience_s,
            preemption,
            hbm_cache=hbm_cache,
        )

    free, single = play(None), play(1)
    assert outcome(free) == outcome(single)
    assert free.decided() == single.decided()
    assert residency(free) == residency(single)


def outcome(rows: Rows) -> dict[int, tuple[Any, ...]]:
    """How every request ended, and when each of its tokens was there."""
    return {
        row.request.request_id: (
            row.state,
            row.reason,
            row.attempts,
            *map(tuple, [np.concatenate([[], *row.token_ends_ns])]),
        )
        for row in rows.requests
    }


def residency(rows: Rows) -> list[tuple[Any, ...]]:
    """Everything that came into a pool or left one, in order."""
    return [event for event in rows.events if event[1] in ("insert", "evict", "drop", "preempt")]


def test_every_choice_between_fetching_and_computing_has_its_outcome() -> None:
    """How long the chunks that computed the span took, or the copy of it; the same however the world got there."""
    free, single = both("2p2d", 1, 2.0)
    for rows in (free, single):
        fetches = [one for one in rows.decisions if one.stage == "fetch"]
        computed = [one for one in fetches if one.choice == "recompute"]
        assert computed
        assert all(one.outcome == "computed" and one.outcome_s > 0 for one in computed)
        assert all(one.outcome in ("moved", "failed") for one in fetches if one.choice != "recompute")
    outcomes = [[one.outcome_s for one in rows.decisions if one.stage == "fetch"] for rows in (free, single)]
    assert outcomes[0] == outcomes[1]
