"""The conductor's picture: reports as of their ticks, own decisions until a report shows them, nothing left."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_fixtures import COST

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop
from mcjax.sched.reports import BLOCKS_ADDED, BLOCKS_REMOVED, Report, ReportBus, load_report
from mcjax.sched.state import PENDING_NS, ClusterState, LinkEstimate
from mcjax.types import NS_PER_S, Role, Tier

PERIOD = NS_PER_S // 10
MS = NS_PER_S // 1000


def virtual(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    VirtualLoop().run(main)


def cluster(prefill: int = 2, decode: int = 2, mixed: int = 0) -> ClusterState:
    state = ClusterState(COST, LinkEstimate(1e6, 0.0), bytes_per_token=1, block_tokens=100)
    for letter, role, count in (("p", Role.PREFILL, prefill), ("d", Role.DECODE, decode), ("m", Role.MIXED, mixed)):
        for index in range(count):
            state.join(f"{letter}{index}", f"node-{letter}{index}", role, free_tokens=10_000)
    return state


def load(
    state: ClusterState,
    source: str,
    tick_ns: int,
    accepted: int = 0,
    queue_ns: int = 0,
    batch: int = 0,
    tokens: int = 0,
) -> Report:
    number = next(member.index for member in state._all if member.name == source)
    return load_report(tick_ns, [(number, tick_ns, accepted, queue_ns, batch, tokens, 10_000 - tokens, 0)])


def rows(report: Report) -> list[list[int]]:
    """Number, tick and jobs accepted of each instance in a load report."""
    return np.asarray(report.values).reshape(-1, 8)[:, :3].tolist()


def expected_blocks(state: ClusterState) -> int:
    """How many blocks are counted somewhere by a decision alone."""
    return len(state.directory._expected) + sum(map(len, state.directory._expected_counts.values()))


# The bus


def test_a_report_is_seen_at_the_next_tick_and_not_before() -> None:
    async def main() -> None:
        bus = ReportBus(PERIOD)
        number = bus.join()
        await aio.sleep_until_ns(PERIOD // 2)
        bus.load(number, (1, 0, 0, 0, 0, 0))
        assert bus.read() == []
        await aio.sleep_until_ns(PERIOD - 1)
        assert bus.read() == []
        await aio.sleep_until_ns(PERIOD)
        assert [rows(report) for report in bus.read()] == [[[number, PERIOD, 1]]]
        assert bus.read() == []

    virtual(main)


def test_only_the_last_row_before_a_tick_is_seen() -> None:
    async def main() -> None:
        bus = ReportBus(PERIOD)
        first, second = bus.join(), bus.join()
        for accepted in range(5):
            bus.load(first, (accepted, 0, 0, 0, 0, 0))
            bus.load(second, (10 + accepted, 0, 0, 0, 0, 0))
        await aio.sleep_until_ns(PERIOD)
        bus.load(first, (99, 0, 0, 0, 0, 0))  # after the tick: seen at the next one
        (report,) = bus.read()
        assert rows(report) == [[first, PERIOD, 4], [second, PERIOD, 14]]
        await aio.sleep_until_ns(2 * PERIOD)
        assert [rows(report) for report in bus.read()] == [[[first, 2 * PERIOD, 99]]]

    virtual(main)


def test_a_delay_makes_every_view_older_also_in_mid_run() -> None:
    async def main() -> None:
        bus = ReportBus(PERIOD, delay_ns=30 * MS)
        bus.blocks("node-p0", 1, (1, 2))
        bus.blocks("node-p0", -1, (2,))
        await aio.sleep_until_ns(PERIOD + 30 * MS - 1)
        assert bus.read() == []
        await aio.sleep_until_ns(PERIOD + 30 * MS)
        assert [report.kind for report in bus.read()] == [BLOCKS_ADDED, BLOCKS_REMOVED]
        bus.load(bus.join(), (1, 0, 0, 0, 0, 0))
        bus.delay_ns = 500 * MS
        await aio.sleep_until_ns(2 * PERIOD + 499 * MS)
        assert bus.read() == []
        await aio.sleep_until_ns(2 * PERIOD + 500 * MS)
        assert len(bus.read()) == 1

    virtual(main)


# Columns


def test_the_queue_column_counts_down_between_reports_and_adds_own_decisions() -> None:
    state = cluster()
    state.fold(load(state, "p0", PERIOD, queue_ns=3 * NS_PER_S))
    assert state.view(PERIOD, 1000, ()).queue_s.tolist() == [3.0, 0.0]
    assert state.view(PERIOD + NS_PER_S, 1000, ()).queue_s.tolist() == [2.0, 0.0]
    assert state.view(PERIOD + 9 * NS_PER_S, 1000, ()).queue_s.tolist() == [0.0, 0.0], "never below zero"
    state.assign(1, 0, 2, 2 * NS_PER_S, 100, ())
    assert state.view(PERIOD + 9 * NS_PER_S, 1000, ()).queue_s.tolist() == [2.0, 0.0], "it waits behind what was sent"


def test_a_decision_counts_until_its_instance_reports_it_accepted() -> None:
    state = cluster()
    state.assign(1, 0, 2, NS_PER_S, 500, ())
    state.assign(2, 0, 2, 2 * NS_PER_S, 700, ())
    view = state.view(0, 1000, ())
    assert view.queue_s.tolist() == [3.0, 0.0]
    assert view.decode.batch.tolist() == [2, 0]
    assert view.decode.context_tokens.tolist() == [1200, 0]
    assert view.decode.free_tokens.tolist() == [8800, 10_000]
    state.fold(load(state, "p0", PERIOD, accepted=1, queue_ns=NS_PER_S))
    assert state.view(PERIOD, 1000, ()).queue_s.tolist() == [3.0, 0.0], "one reported, one still pending"
    state.fold(load(state, "p0", 2 * PERIOD, accepted=2, queue_ns=3 * NS_PER_S))
    assert state.view(2 * PERIOD, 1000, ()).queue_s.tolist() == [3.0, 0.0], "both reported, none counted twice"
    state.hand_over(1, 2 * PERIOD)
    assert state.view(2 * PERIOD, 1000, ()).decode.batch.tolist() == [2, 0], "on its way, not reported yet"
    state.fold(load(state, "d0", 3 * PERIOD, accepted=1, batch=1, tokens=510))
    view = state.view(3 * PERIOD, 1000, ())
    assert view.decode.batch.tolist() == [2, 0]
    assert view.decode.context_tokens.tolist() == [1210, 0]
    state.settle(1, 3 * PERIOD)
    state.settle(2, 3 * PERIOD)
    assert state.view(3 * PERIOD, 1000, ()).decode.batch.tolist() == [1, 0], "what is reported stays until a report"


def test_mixed_instances_take_prompts_and_are_estimated_by_their_own_columns() -> None:
    state = cluster(prefill=1, decode=1, mixed=1)
    assert state.view(0, 1000, ()).names == ("p0", "m0")
    assert state.view(0, 1000, ()).decode.names == ("d0",)
    mixed = state.members["m0"]
    empty_s = state.step_estimate_s(mixed, 1000)
    assert empty_s == pytest.approx(1e-3 + 1e-6 + 1000e-6)
    state.assign(1, mixed.index, mixed.index, NS_PER_S, 500, ())
    assert state.step_estimate_s(mixed, 1000) == pytest.approx(1e-3 + 2e-6 + 1500e-6)
    state.fold(load(state, "m0", PERIOD, accepted=1, queue_ns=NS_PER_S, batch=0))
    assert state.step_estimate_s(mixed, 1000) == pytest.approx(empty_s), "as the report says: not decoding yet"


# Blocks


def test_expected_blocks_fade_after_the_nodes_next_report() -> None:
    state = cluster()
    state.assign(1, 0, 2, NS_PER_S, 300, (11, 12, 13))
    assert state.view(0, 300, (11, 12, 13)).prefix_tokens.tolist() == [300, 0]
    assert state.replicas((11,)) == [], "an expectation is no replica"
    state.hand_over(1, PERIOD + 5)
    state.fold(load(state, "p0", PERIOD, accepted=1))  # as of a tick before the hand-over: it proves nothing
    assert state.view(PERIOD, 300, (11, 12, 13)).prefix_tokens.tolist() == [300, 0]
    state.fold(Report(2 * PERIOD, "node-p0", BLOCKS_ADDED, (11, 12)))
    state.fold(load(state, "p0", 2 * PERIOD, accepted=1))
    assert state.view(2 * PERIOD, 300, (11, 12, 13)).prefix_tokens.tolist() == [200, 0], "only what is reported"
    assert expected_blocks(state) == 0
    assert state.replicas((11, 12)) == [("node-p0", Tier.DRAM)]
    state.fold(Report(3 * PERIOD, "node-p0", BLOCKS_REMOVED, (12,)))
    assert state.view(3 * PERIOD, 300, (11, 12)).prefix_tokens.tolist() == [100, 0]


def test_two_jobs_may_expect_one_block() -> None:
    state = cluster()
    for request_id in (1, 2):
        state.assign(request_id, 0, 2, 1, 100, (5,))
    state.settle(1, 10)
    state.fold(load(state, "p0", PERIOD))
    assert state.view(PERIOD, 100, (5,)).prefix_tokens.tolist() == [100, 0], "the second still expects it"
    state.settle(2, PERIOD + 1)
    state.fold(load(state, "p0", 2 * PERIOD))
    assert expected_blocks(state) == 0


# Membership


def test_a_draining_instance_gets_no_new_jobs_and_keeps_its_blocks() -> None:
    state = cluster()
    state.fold(Report(PERIOD, "node-p0", BLOCKS_ADDED, (1,)))
    state.drain("p0")
    state.drain("d1")
    view = state.view(PERIOD, 1000, (1,))
    assert view.names == ("p1",)
    assert view.decode.names == ("d0",)
    assert state.replicas((1,)) == [("node-p0", Tier.DRAM)]


def test_who_leaves_takes_its_blocks_and_late_reports_do_not_bring_them_back() -> None:
    state = cluster()
    state.fold(Report(PERIOD, "node-p0", BLOCKS_ADDED, (1, 2)))
    state.assign(1, 0, 2, NS_PER_S, 200, (1, 2))
    state.assign(2, 0, 2, NS_PER_S, 200, (1, 3))
    state.settle(2, PERIOD)
    state.leave("p0")
    state.fold(Report(2 * PERIOD, "node-p0", BLOCKS_ADDED, (3,)))
    state.fold(load(state, "p0", 2 * PERIOD, accepted=1))
    assert state.view(2 * PERIOD, 300, (1, 2, 3)).names == ("p1",)
    assert state.view(2 * PERIOD, 300, (1, 2, 3)).prefix_tokens.tolist() == [0]
    assert len(state.directory) == 0, "nothing is remembered of a node that is gone"
    state.settle(1, 2 * PERIOD)
    assert expected_blocks(state) == 0, "nobody will report for it any more"


def test_who_joins_late_starts_empty_in_a_column_of_its_own() -> None:
    state = cluster()
    state.assign(1, 0, 2, NS_PER_S, 100, ())
    state.leave("p0")
    state.join("p9", "node-p9", Role.PREFILL, 10_000)
    view = state.view(PERIOD, 1000, ())
    assert view.names == ("p1", "p9")
    assert view.queue_s.tolist() == [0.0, 0.0]
    assert state.members["p9"].index == 4


# Any order of events


@dataclass
class Model:
    """What an instance would count by itself: how many jobs reached it, and which."""

    accepted: int = 0
    inside: list[int] = field(default_factory=list[int])


@settings(max_examples=60)
@given(data=st.data())
def test_when_all_is_settled_and_reported_nothing_is_pending_or_expected(data: st.DataObject) -> None:
    state = cluster(prefill=2, decode=2, mixed=1)
    names = ["p0", "p1", "d0", "d1", "m0"]
    models = {name: Model() for name in names}
    gone: dict[str, None] = {}
    waiting: list[str] = list(names)
    jobs: dict[int, tuple[str, str, bool]] = {}
    now_ns = 0

    def report(name: str) -> None:
        tick_ns = (now_ns // PERIOD + 1) * PERIOD
        state.fold(load(state, name, tick_ns, accepted=models[name].accepted))

    for step in range(data.draw(st.integers(1, 40))):
        now_ns += data.draw(st.integers(0, PERIOD))
        action = data.draw(st.sampled_from(["assign", "assign", "hand_over", "settle", "report", "leave"]))
        alive = [name for name in waiting if name not in gone]
        if action == "assign":
            prefills = [name for name in alive if name[0] != "d"]
            decodes = [name for name in alive if name[0] == "d"]
            if not prefills or not decodes:
                continue
            first = data.draw(st.sampled_from(prefills))
            second = first if first[0] == "m" else data.draw(st.sampled_from(decodes))
            blocks = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3, unique=True)))
            work_ns, tokens = data.draw(st.integers(0, NS_PER_S)), data.draw(st.integers(0, 900))
            state.assign(step, state.members[first].index, state.members[second].index, work_ns, tokens, blocks)
            jobs[step] = (first, second, False)
            models[first].accepted += 1
        elif action == "hand_over":
            ready = [job for job, (first, second, handed) in jobs.items() if first != second and not handed]
            if ready:
                job = data.draw(st.sampled_from(ready))
                first, second, _ = jobs[job]
                state.hand_over(job, now_ns)
                jobs[job] = (first, second, True)
                models[second].accepted += 1
        elif action == "settle" and jobs:
            job = data.draw(st.sampled_from(list(jobs)))
            del jobs[job]
            state.settle(job, now_ns)
        elif action == "report" and alive:
            report(data.draw(st.sampled_from(alive)))
        elif action == "leave" and len(alive) > 3:
            name = data.draw(st.sampled_from(alive))
            gone[name] = None
            state.leave(name)
        assert (state._columns[PENDING_NS:] >= 0).all()
    for job in list(jobs):
        state.settle(job, now_ns)
    assert not state._columns[PENDING_NS:].any(), "settled jobs are nobody's burden"
    now_ns += PERIOD
    for name in names:
        if name not in gone:
            report(name)
    assert expected_blocks(state) == 0
    assert not any(state._fading)
    view = state.view(now_ns + PERIOD, 1000, ())
    assert np.array_equal(view.queue_s, np.zeros(len(view.names)))
    live = [state.members[name].index for name in names if name not in gone]
    assert not any(state._unreported[index] for index in live), "every job that was sent has been accounted for"
