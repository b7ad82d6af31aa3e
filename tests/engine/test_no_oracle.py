"""Nobody but the simulated executor knows how long an answer will be: changing that changes nothing before it shows."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from engine_fixtures import Rows, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.types import Script, Tokens
from mcjax.workload.base import Session, Turn, Workload
from mcjax.workload.synthetic import Synthetic

MAX_TOKENS = 40


def traffic(seed: int) -> Synthetic:
    return Synthetic(
        seed=seed,
        sessions=12,
        tenants={"a": {"share": 0.5, "system_prompt_tokens": 300}, "b": {"share": 0.5, "system_prompt_tokens": 900}},
        turns=(1, 3),
        first_prompt_tokens=(200, 4000),
        user_tokens=(20, 400),
        output_tokens=(1, MAX_TOKENS),
        max_tokens=MAX_TOKENS,
        rate_per_s=6.0,
        think_time_s=0.3,
    )


@dataclass
class OtherFuture:
    """A workload in which one request's answer is longer or shorter than it was."""

    workload: Workload
    request_id: int
    output_tokens: int
    name: str = "other future"
    block_tokens: int | None = None

    def inputs(self) -> dict[str, str]:
        return {}

    def sessions(self) -> Iterator[Session]:
        for session in self.workload.sessions():
            yield _OtherSession(session, self, session.start_ns)


@dataclass
class _OtherSession:
    session: Session
    change: OtherFuture
    start_ns: int

    def next_turn(self, answer: Tokens | None) -> Turn | None:
        turn = self.session.next_turn(answer)
        if turn is None or turn.request.request_id != self.change.request_id:
            return turn
        length, tokens = self.change.output_tokens, turn.script.tokens
        if tokens is not None:
            tokens = np.concatenate([tokens, np.zeros(length, np.int32)])[:length]
        return replace(turn, script=Script(length, tokens))


@functools.cache
def original(cluster: str, seed: int) -> Rows:
    return simulate(traffic(seed), cluster)


def before(rows: Rows, time_ns: int) -> dict[str, list[tuple[Any, ...]]]:
    """Everything that was decided, happened or was reported earlier than `time_ns`."""
    return {
        "decisions": rows.decided(time_ns),
        "events": [event for event in rows.events if event[0] < time_ns],
        "reports": [report for report in rows.reports if report[0] < time_ns],
    }


@pytest.mark.parametrize("cluster", ["2p2d", "2m", "1p1d+1m"])
@settings(max_examples=8)
@given(data=st.data(), seed=st.integers(0, 2), length=st.integers(1, MAX_TOKENS))
def test_a_changed_future_changes_nothing_before_its_first_divergent_token(
    cluster: str, data: st.DataObject, seed: int, length: int
) -> None:
    rows = original(cluster, seed)
    changed = data.draw(st.sampled_from(sorted(rows.requests, key=lambda row: row.request.request_id)), label="request")
    other = simulate(OtherFuture(traffic(seed), changed.request.request_id, length), cluster)
    same = min(length, changed.output_tokens)
    # The last common token is where the futures part: in one of them the output ends with it.
    parting_ns = int(np.concatenate(changed.token_ends_ns)[same - 1])
    if length == changed.output_tokens:
        parting_ns = 1 << 62
    ours, theirs = before(rows, parting_ns), before(other, parting_ns)
    for table, expected in ours.items():
        assert theirs[table] == expected, f"{table} knew the future"
    (again,) = [row for row in other.requests if row.request.request_id == changed.request.request_id]
    assert again.output_tokens == length
    assert np.concatenate(again.token_ends_ns)[:same].tolist() == np.concatenate(changed.token_ends_ns)[:same].tolist()


def test_the_future_does_matter_later() -> None:
    """Or the test above would compare runs that could not differ."""
    rows = original("2p2d", 0)
    longest = max(rows.requests, key=lambda row: row.output_tokens)
    other = simulate(OtherFuture(traffic(0), longest.request.request_id, 1), "2p2d")
    assert rows.decided() != other.decided()
    assert rows.events != other.events
