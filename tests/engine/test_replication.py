"""Replicas of hot spans: as many as wanted, never two in one fault domain, restored in order and within the bound."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from engine_fixtures import MS, CheckBench, Rows, expected, service
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax import aio
from mcjax.backends.check.faults import Faults
from mcjax.backends.sim.world import SimWorld
from mcjax.cost import catalogue
from mcjax.engine.cluster_spec import InstanceSpec, parse_cluster
from mcjax.engine.replication import ReplicationSettings, Replicator, Shortfall
from mcjax.engine.service import Service, Settings
from mcjax.errors import ConfigError, PoolFull
from mcjax.types import NS_PER_S, Request, RequestState, Role, Script
from mcjax.workload.driver import ScriptBook

QUICK = ReplicationSettings(piece_blocks=2, retry_s=0.01, look_s=0.05)
PROMPTS = [[100 * which + token for token in range(26)] for which in range(4)]
"""Six blocks of four tokens each, and a rest."""


async def computed(bench: CheckBench, service: Service, which: int = 0, request_id: int = -1) -> tuple[int, ...]:
    """Compute a prompt somewhere; its blocks, once reports have told of them."""
    request = bench.request(which if request_id < 0 else request_id, PROMPTS[which], 3)
    row = await service.frontend.submit(request).task
    assert row.state is RequestState.COMPLETED
    await aio.sleep_ns(30 * MS)
    return tuple(row.blocks)[:6]


async def settled(service: Service, span: tuple[int, ...], seconds: float = 2.0) -> tuple[str, ...]:
    """Wait until the span has what is wanted, or nothing more can be done; the nodes that have it."""
    replicator = service.cluster.replicator
    await aio.sleep_ns(MS)
    for _ in range(round(seconds * 1000)):
        standing = replicator.standing(span)
        if standing.shortfall is not None or len(standing.nodes) == standing.wanted:
            break
        await aio.sleep_ns(MS)
    check(service, span)
    return replicator.standing(span).nodes


def check(service: Service, span: tuple[int, ...]) -> None:
    """Every replica holds the very bytes, and no two are in one domain."""
    standing = service.cluster.replicator.standing(span)
    nodes = [service.cluster.nodes[name] for name in standing.nodes]
    domains = [node.domain for node in nodes]
    assert len(domains) == len(dict.fromkeys(domains))
    for node in nodes:
        assert node.pool.match(span) == len(span)
        assert node.pool.checksums(span) == nodes[0].pool.checksums(span)
        slots = [list(one.pool.region(span).slots) for one in (node, nodes[0])]
        mine, first = (one.pool.store.buffer() for one in (node, nodes[0]))
        assert mine is not None
        assert first is not None
        assert np.array_equal(mine[slots[0]], first[slots[1]])


def holders(service: Service, span: tuple[int, ...]) -> list[str]:
    nodes = service.cluster.nodes.values()
    return [node.name for node in nodes if node.alive and node.pool.match(span) == len(span)]


def copied(rows: Rows) -> list[tuple[int, int, int]]:
    """`(start, end, bytes)` of every copy that was made for a replica, in order of their ends."""
    found: list[tuple[int, int, int]] = []
    for time_ns, kind, request_id, _, *values in rows.events:
        told = dict(values)
        if kind == "transfer" and request_id == -1:
            found.append((told["start_ns"], time_ns, told["nbytes"]))
    return found


def test_as_many_as_wanted_and_fewer_again() -> None:
    bench = CheckBench("5m", replication=QUICK)

    async def main(service: Service) -> None:
        span = await computed(bench, service)
        (origin,) = holders(service, span)
        replicator = service.cluster.replicator
        replicator.want(span, 3)
        assert len(await settled(service, span)) == 3
        assert len(holders(service, span)) == 3
        replicator.want(span, 5)
        assert len(await settled(service, span)) == 5
        replicator.want(span, 2)
        assert len(await settled(service, span)) == 2
        assert len(holders(service, span)) == 2, "what was made for it is gone"
        replicator.forget(span)
        assert holders(service, span) == [origin], "it was there before, and stays until it is evicted"
        assert service.cluster.nodes[origin].pool.held == 0

    bench.run(main)


def test_a_dropped_replica_is_made_elsewhere() -> None:
    bench = CheckBench("4m", replication=QUICK)

    async def main(service: Service) -> None:
        span = await computed(bench, service)
        replicator = service.cluster.replicator
        replicator.want(span, 2)
        first = await settled(service, span)
        replicator.drop(span, first[1])
        assert first[1] not in holders(service, span)
        again = await settled(service, span)
        assert len(again) == 2
        assert first[1] not in again

    bench.run(main)


def test_never_two_in_one_domain_and_the_answer_says_why_not() -> None:
    bench = CheckBench({"mixed": 6, "per_domain": 2}, replication=QUICK)

    async def main(service: Service) -> None:
        span = await computed(bench, service)
        replicator = service.cluster.replicator
        replicator.want(span, 4)
        assert len(await settled(service, span)) == 3
        assert replicator.standing(span).shortfall is Shortfall.NO_DOMAIN
        service.cluster.join(InstanceSpec("m6", Role.MIXED, "domain-2"))
        await aio.sleep_ns(50 * MS)
        assert len(replicator.standing(span).nodes) == 3, "there is one in that rack"
        service.cluster.join(InstanceSpec("m7", Role.MIXED, "domain-3"))
        await aio.sleep_ns(50 * MS)
        assert "node-m7" in await settled(service, span)
        assert len(replicator.standing(span).nodes) == 4
        assert replicator.standing(span).shortfall is None

    bench.run(main)


def test_what_nobody_holds_is_said_to_be_so_and_made_when_it_comes() -> None:
    bench = CheckBench("3m", replication=QUICK)

    async def main(service: Service) -> None:
        other = await computed(bench, service, 1)
        replicator = service.cluster.replicator
        replicator.want((*other, 999), 2)
        await aio.sleep_ns(20 * MS)
        assert replicator.standing((*other, 999)).shortfall is Shortfall.NO_SOURCE
        replicator.forget((*other, 999))
        with pytest.raises(KeyError):
            replicator.standing((*other, 999))
        first = await computed(bench, service, 0)
        for node in holders(service, first):
            service.cluster.nodes[node].pool.drop(first[:1])
        replicator.want(first, 2)
        await aio.sleep_ns(20 * MS)
        assert replicator.standing(first).shortfall is Shortfall.NO_SOURCE
        assert await computed(bench, service, 0, 9) == first
        await aio.sleep_ns(100 * MS)
        assert len(await settled(service, first)) == 2

    bench.run(main)


def test_a_full_pool_is_passed_over_and_said_to_be_full() -> None:
    bench = CheckBench("3m", replication=QUICK)

    async def main(service: Service) -> None:
        span = await computed(bench, service)
        full = [node for node in service.cluster.nodes.values() if node.name not in holders(service, span)]
        holds = [(node, node.pool.reserve(7, node.pool.store.free_slots - 3)) for node in full]
        with pytest.raises(PoolFull):
            full[0].pool.reserve(7, 6)
        replicator = service.cluster.replicator
        replicator.want(span, 3)
        await aio.sleep_ns(100 * MS)
        assert replicator.standing(span).shortfall is Shortfall.NO_ROOM
        assert [len(node.pool) for node in full] == [0, 0], "no half replica stays where the other half has no room"
        full[0].pool.release(holds[0][1])
        await aio.sleep_ns(200 * MS)
        assert full[0].name in replicator.standing(span).nodes
        full[1].pool.release(holds[1][1])
        await aio.sleep_ns(200 * MS)
        assert len(await settled(service, span)) == 3

    bench.run(main)


def test_a_lost_nodes_replicas_come_back_the_most_urgent_first_within_the_bound() -> None:
    """Six blocks take `6 * block_bytes` of a bound of 40 blocks a second: a replica each 150 ms."""
    bench = CheckBench("5m", replication=QUICK)

    async def main(service: Service) -> None:
        spans = [await computed(bench, service, which) for which in range(3)]
        block_bytes = next(iter(service.cluster.nodes.values())).pool.store.block_bytes
        bound = 40.0 * block_bytes
        replicator = service.cluster.replicator = Replicator(
            service.cluster.nodes,
            service.conductor,
            bench.rows,
            service.cluster._scope,
            ReplicationSettings(bound, piece_blocks=2, retry_s=0.01, look_s=0.05),
        )
        for span, priority in zip(spans, (0, 5, 1)):
            replicator.want(span, 4, priority)
        for span in spans:
            assert len(await settled(service, span, 10.0)) == 4
        common = next(
            name for name in service.cluster.nodes if all(name in replicator.standing(span).nodes for span in spans)
        )
        before = len(bench.rows.events)
        service.cluster.kill(common.removeprefix("node-"))
        await aio.sleep_ns(50 * MS)
        for span in spans:
            nodes = await settled(service, span, 10.0)
            assert len(nodes) == 4
            assert common not in nodes
        restored = [event for event in bench.rows.events[before:] if event[1] == "replicate"]
        assert [dict(event[4:])["first_block"] for event in restored] == [spans[1][0], spans[2][0], spans[0][0]]
        moves = copied(bench.rows)
        for first in range(len(moves)):
            for last in range(first + 1, len(moves)):
                seconds = (moves[last][0] - moves[first][0]) / NS_PER_S
                taken = sum(nbytes for _, _, nbytes in moves[first:last])
                assert taken <= bound * seconds + 1e-3 * bound

    bench.run(main)


def test_what_arrived_before_a_source_died_is_not_sent_again() -> None:
    bench = CheckBench("3m", replication=ReplicationSettings(piece_blocks=1, retry_s=0.01, look_s=0.05))

    async def main(service: Service) -> None:
        span = await computed(bench, service)
        replicator = service.cluster.replicator
        replicator.want(span, 2)
        first, second = await settled(service, span)
        replicator.want(span, 3)
        before = len(copied(bench.rows))
        while len(copied(bench.rows)) < before + 3:
            await aio.sleep_ns(MS // 10)
        service.cluster.kill(first.removeprefix("node-"))
        await aio.sleep_ns(100 * MS)
        nodes = await settled(service, span)
        assert len(nodes) == 2
        assert second in nodes
        assert replicator.standing(span).shortfall is Shortfall.NO_DOMAIN
        assert len(copied(bench.rows)) - before <= len(span) + 1, "at most the piece that was under way went twice"

    bench.run(main)


def test_a_corrupt_replica_is_neither_kept_nor_spread() -> None:
    bench = CheckBench("4m", replication=QUICK)

    async def main(service: Service) -> None:
        span = await computed(bench, service)
        replicator = service.cluster.replicator
        replicator.want(span, 2)
        first, second = await settled(service, span)
        node = service.cluster.nodes[first]
        buffer = node.pool.store.buffer()
        assert buffer is not None
        buffer[node.pool.region(span[3:4]).slots[0], 0] ^= 1
        node.outgoing_bytes -= 1  # so that it is the one to be read
        replicator.want(span, 3)
        await aio.sleep_ns(300 * MS)
        node.outgoing_bytes += 1
        nodes = await settled(service, span)
        assert len(nodes) == 3
        assert second in nodes

    bench.run(main)


def test_a_node_that_leaves_is_not_waited_for_for_ever() -> None:
    bench = CheckBench("3m", replication=QUICK)

    async def main(service: Service) -> None:
        span = await computed(bench, service)
        replicator = service.cluster.replicator
        replicator.want(span, 2)
        first, _ = await settled(service, span)
        await service.cluster.drain(first.removeprefix("node-"))
        nodes = await settled(service, span)
        assert len(nodes) == 2
        assert first not in nodes
        await service.cluster.drain(nodes[0].removeprefix("node-"))
        assert replicator.standing(span).nodes == nodes[1:]
        assert replicator.standing(span).shortfall is Shortfall.NO_DOMAIN

    bench.run(main)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), death_ms=st.integers(0, 80))
def test_copies_that_are_lost_late_or_slow_only_take_longer(seed: int, death_ms: int) -> None:
    """A third of all copies goes wrong, and a node that has a replica dies on the way."""
    faults = Faults(lost=0.15, late=0.08, duplicated=0.1, slow=0.1)
    bench = CheckBench("5m", seed=seed, replication=QUICK, faults=faults, attempts=40)

    async def main(service: Service) -> None:
        span = await computed(bench, service)
        replicator = service.cluster.replicator
        replicator.want(span, 3)
        await aio.sleep_ns(death_ms * MS)
        nodes = replicator.standing(span).nodes
        if len(nodes) > 1:
            service.cluster.kill(nodes[-1].removeprefix("node-"))
        for _ in range(200):
            check(service, span)
            await aio.sleep_ns(50 * MS)
            if len(replicator.standing(span).nodes) == 3:
                break
        assert len(replicator.standing(span).nodes) == 3
        check(service, span)

    bench.run(main)


@settings(max_examples=10, deadline=None)
@given(
    copies=st.integers(1, 4),
    deaths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), max_size=4),
    seed=st.integers(0, 9),
)
def test_deaths_at_any_moment(copies: int, deaths: list[tuple[int, int]], seed: int) -> None:
    """Six nodes in three racks, up to four of them die; in the end what can be is there, and tokens stay right."""
    bench = CheckBench({"mixed": 6, "per_domain": 2}, seed=seed, replication=QUICK)

    async def main(service: Service) -> None:
        spans = [await computed(bench, service, which) for which in range(2)]
        replicator = service.cluster.replicator
        for span in spans:
            replicator.want(span, copies, priority=span[0])
        for which, after_ms in deaths:
            await aio.sleep_ns(after_ms * MS)
            if f"m{which}" in service.cluster.instances:
                service.cluster.kill(f"m{which}")
            for span in spans:
                check(service, span)
        await aio.sleep_ns(NS_PER_S // 2)
        racks = dict.fromkeys(one.node.domain for one in service.cluster.instances.values())
        for span in spans:
            check(service, span)
            standing = replicator.standing(span)
            if standing.nodes:
                assert len(standing.nodes) == min(copies, len(racks))
            else:
                assert standing.shortfall is Shortfall.NO_SOURCE
        row = await service.frontend.submit(bench.request(50, PROMPTS[0], 5)).task
        assert row.state is RequestState.COMPLETED
        assert row.output == expected(row.request, 5)

    bench.run(main)


@pytest.mark.parametrize("told", [{"bytes_per_s": 0.0}, {"piece_blocks": 0}, {"retry_s": -1.0}])
def test_bounds_that_are_none_are_refused_by_name(told: Mapping[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"replication.{next(iter(told))}"):
        ReplicationSettings(**told)  # pyright: ignore[reportArgumentType]


# A hot spot: everybody wants what one node has


def egress(copies: int) -> list[int]:
    """Bytes of a hot prefix that each of eight nodes sent to others, when seven more prompts begin with it,
    8 ms apart, while it has so many replicas."""
    rows, book = Rows(), ScriptBook()
    world = SimWorld(
        catalogue.model("llama3-70b"), catalogue.hardware("a800x8"), catalogue.fitted(), book, 64, chunk_tokens=2048
    )

    def prompt(number: int) -> Request:
        book.put(number, Script(2))
        tokens = np.concatenate([np.arange(6400), np.full(2048, number)]).astype(np.int32)
        return Request(number, 0, len(tokens), 2, tokens=tokens)

    async def body() -> None:
        async with aio.Scope("test") as scope:
            made = service(scope, world, rows, Settings(report_period_s=0.005), world.keeps_tokens, 512)
            made.start(parse_cluster("8m"))

            async def main() -> None:
                row = await made.frontend.submit(prompt(0)).task
                await aio.sleep_ns(20 * MS)
                hot = row.blocks[:100]
                made.cluster.replicator.want(hot, copies)
                while len(made.cluster.replicator.standing(hot).nodes) < copies:
                    await aio.sleep_ns(MS)
                tickets = []
                for number in range(1, 8):
                    tickets.append(made.frontend.submit(prompt(number)))
                    await aio.sleep_ns(8 * MS)
                for ticket in tickets:
                    await ticket.task

            await scope.run(main())
            made.cluster.check_idle()

    world.run(body)
    sent = dict.fromkeys((f"node-m{index}" for index in range(8)), 0)
    for _, kind, request_id, place, *values in rows.events:
        source, _, target = place.partition(">")
        if kind == "transfer" and request_id > 0 and source != target and target in sent and source in sent:
            sent[source] += dict(values)["nbytes"]
    return list(sent.values())


def test_a_hot_spot_is_spread_over_its_replicas() -> None:
    """Reads go to the replica with the least to send, so the busiest node sends less, and there is less to send."""
    alone, replicated = egress(1), egress(3)
    assert sum(alone) > sum(replicated) > 0

    def peak(sent: list[int]) -> float:
        return max(sent) * len(sent) / sum(sent)

    assert peak(replicated) < 0.75 * peak(alone)
    assert max(replicated) < 0.75 * max(alone)
