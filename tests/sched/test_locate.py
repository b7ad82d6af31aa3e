"""Where a missing span comes from: replicas by tier, what each is expected to take, and the row that says so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from sched_fixtures import COST, request

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop
from mcjax.sched.admission.none import AdmitAll
from mcjax.sched.base import Located, PrefillSelection, Recompute, Replica
from mcjax.sched.decode.least_loaded import LeastLoaded
from mcjax.sched.fetch.cheapest import Cheapest
from mcjax.sched.fetch.priority_aware import PriorityAware
from mcjax.sched.job import Computed
from mcjax.sched.journal import Journal
from mcjax.sched.placement import Strategies, locate, place
from mcjax.sched.prefill.cache_aware import CacheAware
from mcjax.sched.prefill.kvcache_centric import KVCacheCentric
from mcjax.sched.reports import BLOCKS_ADDED, SSD_ADDED, SSD_QUEUE, SSD_REMOVED, Report, ReportBus, load_report
from mcjax.sched.roles.static import Static
from mcjax.sched.state import ClusterState, LinkEstimate
from mcjax.types import NS_PER_S, SLO, NullRecorder, Role, Tier
from mcjax.workload.lengths import Constant

NET = LinkEstimate(1e4, 0.001)
SSD = LinkEstimate(1e3, 0.01)
DRAM_P0, SSD_P0, SSD_P1 = ("node-p0", Tier.DRAM), ("node-p0", Tier.SSD), ("node-p1", Tier.SSD)


def cluster(ssd: LinkEstimate | None = SSD, *reports: tuple[str, str, Sequence[int]]) -> ClusterState:
    """p0, p1 and d0, one byte a token and 100 tokens a block, request 1 placed on p1."""
    state = ClusterState(COST, NET, 1, 100, ssd)
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE)):
        state.join(name, f"node-{name}", role, 10_000)
    state.assign(1, 1, 2, 0, 400, ())
    for node, kind, values in reports:
        state.fold(Report(0, node, kind, values))
    return state


def found(
    state: ClusterState, exclude: Sequence[tuple[str, Tier]] = (), produced: int = 0, blocks: Sequence[int] = (5, 6)
) -> Located:
    strategies = Strategies(KVCacheCentric(), LeastLoaded(), Cheapest(), AdmitAll(), Static(), Constant(8))
    rng = np.random.default_rng(0)
    return locate(request(priority=3), blocks, 2, exclude, produced, state, strategies, rng, 0, NullRecorder())


def estimates(located: Located) -> dict[str, float]:
    decision = located.decision
    return dict(zip(decision.names, decision.candidates["transfer_s"].tolist()))


HELD = (("node-p0", BLOCKS_ADDED, (5, 6, 7)), ("node-p0", SSD_ADDED, (5, 6)), ("node-p1", SSD_ADDED, (5, 6)))


def test_each_tier_takes_what_its_way_takes() -> None:
    """200 bytes: 0.001 s + 0.02 s over the network, 0.01 s + 0.2 s off an SSD, both from the SSD of another node."""
    located = found(cluster(SSD, *HELD))
    got = estimates(located)
    assert list(got) == ["node-p0", "node-p0/ssd", "node-p1/ssd", "recompute"]
    assert [got[name] for name in list(got)[:3]] == pytest.approx([0.021, 0.231, 0.21])
    assert located.replica == Replica("node-p0", got["node-p0"])
    assert located.decision.choice == "node-p0"
    assert located.decision.candidates["prefill_s"][-1] == pytest.approx(0.2), "1 ms a token"


def test_what_is_queued_there_goes_first() -> None:
    state = cluster(SSD, *HELD, ("node-p1", SSD_QUEUE, (300,)), ("node-p0", SSD_QUEUE, (100,)))
    state.fold(load_report(0, [(0, 0, 0, 0, 0, 0, 10_000, 5000)]))
    got = estimates(found(state))
    assert got["node-p0"] == pytest.approx(0.021 + 0.5)
    assert got["node-p0/ssd"] == pytest.approx(0.21 + 0.1 + 0.021 + 0.5)
    assert got["node-p1/ssd"] == pytest.approx(0.21 + 0.3)
    state.fold(Report(0, "node-p1", SSD_QUEUE, (0,)))
    assert estimates(found(state))["node-p1/ssd"] == pytest.approx(0.21)


def test_a_tier_that_was_looked_at_is_left_out_and_the_nodes_other_tier_is_not() -> None:
    state = cluster(SSD, *HELD)
    assert list(estimates(found(state, [DRAM_P0]))) == ["node-p0/ssd", "node-p1/ssd", "recompute"]
    assert list(estimates(found(state, [DRAM_P0, SSD_P1]))) == ["node-p0/ssd", "recompute"]
    last = found(state, [DRAM_P0, SSD_P0, SSD_P1])
    assert last.answer is Recompute.RECOMPUTE
    assert last.replica is None
    assert last.decision.expected_s == pytest.approx(0.2)


def test_a_replica_holds_the_whole_span() -> None:
    state = cluster(SSD, ("node-p0", BLOCKS_ADDED, (5,)), ("node-p1", SSD_ADDED, (5, 6)))
    assert list(estimates(found(state))) == ["node-p1/ssd", "recompute"]
    state.fold(Report(0, "node-p1", SSD_REMOVED, (6,)))
    assert list(estimates(found(state))) == ["recompute"]


def test_without_an_estimate_of_ssds_nothing_is_fetched_from_one() -> None:
    assert list(estimates(found(cluster(None, *HELD)))) == ["node-p0", "recompute"]


def test_a_node_that_has_gone_holds_nothing() -> None:
    state = cluster(SSD, *HELD)
    state.leave("p0")
    assert list(estimates(found(state))) == ["node-p1/ssd", "recompute"]
    assert estimates(found(state))["node-p1/ssd"] == pytest.approx(0.21)


def test_the_row_says_whose_it_is_and_takes_the_outcome() -> None:
    located = found(cluster(SSD, *HELD), produced=5)
    assert located.decision.reason == "priority 3, 3 tokens to come"
    located.note("moved", 0.25)
    assert (located.decision.outcome, located.decision.outcome_s) == ("moved", 0.25)


def test_a_strategy_is_told_priority_and_length() -> None:
    """The SSD takes 10 ms longer than computing: too long for 3 more tokens, not for 8."""
    held = ("node-p1", SSD_ADDED, (5, 6))
    answers: list[object] = []
    for urgent, produced in ((4, 0), (4, 5), (3, 0)):
        fetch = PriorityAware(patience_s_per_token=0.002, urgent=urgent)
        strategies = Strategies(KVCacheCentric(), LeastLoaded(), fetch, AdmitAll(), Static(), Constant(8))
        rng, state = np.random.default_rng(0), cluster(SSD, held)
        one = locate(request(priority=3), (5, 6), 2, (), produced, state, strategies, rng, 0, NullRecorder())
        answers.append(one.decision.choice)
    assert answers == ["node-p1/ssd", "recompute", "recompute"]


# The view, and what a placement expects of it


def test_a_view_shows_what_lies_on_the_ssd_beyond_the_host_memory() -> None:
    state = cluster(SSD, ("node-p0", SSD_ADDED, (5, 6, 7)), ("node-p1", SSD_ADDED, (5,)), ("node-p1", SSD_QUEUE, (9,)))
    state.fold(Report(0, "node-p0", BLOCKS_ADDED, (5,)))
    state.fold(Report(0, "node-p1", BLOCKS_ADDED, (5, 6)))
    view = state.view(0, 400, (5, 6, 7, 8))
    assert view.prefix_tokens.tolist() == [100, 200]
    assert view.ssd is not None
    assert view.ssd_tokens.tolist() == [200, 0]
    assert view.ssd.queued_bytes.tolist() == [0, 9]
    state.leave("p1")
    state.join("p2", "node-p1", Role.PREFILL, 10_000)
    again = state.view(0, 400, (5,))
    assert again.ssd is not None
    assert again.ssd.queued_bytes.tolist() == [0, 0], "the queue has gone with its node"


def test_a_view_of_nodes_without_ssds_has_no_such_columns() -> None:
    assert cluster(SSD, ("node-p0", BLOCKS_ADDED, (5,))).view(0, 400, (5,)).ssd is None
    assert cluster(None, *HELD).view(0, 400, (5,)).ssd is None


@pytest.mark.parametrize("selection", [KVCacheCentric(), CacheAware()])
def test_a_placement_expects_what_it_loads(selection: PrefillSelection) -> None:
    """200 of 400 tokens off the SSD in 0.01 + 0.02 s, the others computed in 0.2 s, which is the instance's work."""
    quick = LinkEstimate(1e4, 0.01)
    state = cluster(quick, ("node-p1", SSD_ADDED, (5, 6)))
    state.settle(1, 0)
    strategies = Strategies(selection, LeastLoaded(), Cheapest(), AdmitAll(), Static(), Constant(8))
    rng, slo = np.random.default_rng(0), SLO(1.0, 1.0)
    placed = place(request(400), (5, 6, 7, 8), slo, state, strategies, rng, 0, NullRecorder())
    assert (placed.prefill, placed.source_node, placed.reused_tokens) == ("p1", None, 200)
    assert placed.expected_ttft_s == pytest.approx(0.03 + 0.2)
    assert placed.prefill_estimate_ns == pytest.approx(0.2 * NS_PER_S)
    assert placed.decision.candidates["load_s"].tolist() == pytest.approx([0.0, 0.03])


# The journal


def walked(kind: str) -> list[tuple[object, ...] | None]:
    """What the journal decides again of one row of somebody's who asks, on the cluster of `HELD`."""
    strategies = Strategies(KVCacheCentric(), LeastLoaded(), Cheapest(), AdmitAll(), Static(), Constant(8))
    journal = Journal(strategies, COST, NET, 1, 100, np.random.default_rng(0), SSD)
    asks = dict.fromkeys(("arrival_ns", "turn", "priority", "slo_ttft_s", "slo_tbt_s"), 0)
    asks |= {"request_id": 1, "prompt_tokens": 400, "max_tokens": 8}
    of = {**asks, "tenant": "", "session": "", "parent": None, "blocks": ()}
    rows = [
        {"source": "conductor", "kind": f"join {name} node-{name} {role}", "values": [10_000], "time_ns": 0}
        for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE))
    ]
    rows += [{"source": node, "kind": sign, "values": list(blocks), "tick_ns": 0} for node, sign, blocks in HELD]
    rows += [
        {"source": "conductor", "kind": "assign", "values": [1, 1, 2, 0, 400], "time_ns": 0},
        {"source": "conductor", "kind": kind, "values": [1, 2, 5, 6], "time_ns": 0},
    ]
    return [one.again for one in journal.walk([of], rows, [])]


def test_rows_are_read_back_as_they_were_written() -> None:
    assert [again and again[0] for again in walked("locate - 0")] == ["node-p0"]
    assert [again and again[0] for again in walked("locate node-p0/dram 3")] == ["recompute"]
    assert [again and again[4] for again in walked("locate node-p0/dram,node-p1/ssd 3")] == [
        "priority 0, 5 tokens to come"
    ]


def test_rows_from_before_there_were_tiers_mean_host_memories() -> None:
    assert walked("locate node-p0") == walked("locate node-p0/dram 0")
    assert walked("locate node-p1,node-d0") == walked("locate node-p1/dram,node-d0/dram 0")


# The bus


def test_only_the_last_length_of_an_ssds_queue_before_a_tick_is_seen() -> None:
    async def main() -> None:
        bus = ReportBus(NS_PER_S)
        bus.ssd_queue("n", 5)
        bus.ssd_queue("m", 6)
        bus.ssd_queue("n", 7)
        assert bus.read() == []
        await aio.sleep_ns(NS_PER_S)
        bus.ssd_queue("n", 0)
        assert [(one.source, one.kind, tuple(one.values)) for one in bus.read()] == [
            ("n", SSD_QUEUE, (7,)),
            ("m", SSD_QUEUE, (6,)),
        ]
        await aio.sleep_ns(NS_PER_S)
        assert [tuple(one.values) for one in bus.read()] == [(0,)]

    VirtualLoop().run(main)


def test_what_is_computed_instead_took_its_share_of_the_chunks_it_was_in() -> None:
    """Tokens 200 .. 400, in chunks of 150: none of the first, two thirds of the others."""
    decision = found(cluster(SSD)).decision
    span = Computed(decision, 200, 400)
    for index, took_s in enumerate((9.0, 0.3, 0.6)):
        assert decision.outcome == ""
        span.chunk(150 * index, 150 * (index + 1), took_s)
    assert decision.outcome == "computed"
    assert decision.outcome_s == pytest.approx(0.3 * 100 / 150 + 0.6 * 100 / 150)
