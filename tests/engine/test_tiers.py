"""What goes down to a node's SSD comes back up, byte for byte, whatever fails; what does not is counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from engine_fixtures import CheckBench, expected
from tiers_fixtures import MS, TieredNode, payload

from mcjax import aio
from mcjax.backends.check.faults import Faults
from mcjax.backends.check.store import ByteStore, DiskStore
from mcjax.backends.check.world import Sizes
from mcjax.engine.prefix import load
from mcjax.engine.promotion import CORRUPT, NO_ROOM, UNAVAILABLE
from mcjax.engine.service import Service
from mcjax.errors import BlockCorrupt, LeaseLost
from mcjax.kvpool.base import Tiering
from mcjax.kvpool.tiering.on_evict import OnEvict
from mcjax.kvpool.tiering.write_back import WriteBack
from mcjax.kvpool.tiering.write_through import WriteThrough
from mcjax.sched.job import Job, Placement
from mcjax.sched.output import Output
from mcjax.transfer.base import Copy, CopyResult
from mcjax.types import NS_PER_S, SLO, Decision, Miss, RequestRow, RequestState, Tier

CHAIN = tuple(range(1, 7))
OTHER = tuple(range(11, 17))
TIERINGS = [WriteThrough(), WriteThrough(1), WriteBack(0.2), OnEvict(), OnEvict(exclusive=True)]


def names(tiering: Tiering) -> str:
    return repr(tiering)


async def written(node: TieredNode, *chains: tuple[int, ...]) -> None:
    for chain in chains:
        node.dram.release(await node.write(chain))


async def moved_down(node: TieredNode, *chains: tuple[int, ...]) -> None:
    """The chains were in host memory, and have left it."""
    await written(node, *chains)
    await node.make_room(node.memory.capacity)
    assert len(node.dram) == 0


def flip(node: TieredNode, block: int) -> None:
    (slot,) = node.ssd.region((block,)).slots
    node.disk.buffer()[slot, 3] ^= 1


# What is written is read back (field failures 18 to 22)


@pytest.mark.parametrize("tiering", [WriteThrough(), WriteBack(0.2), OnEvict(), OnEvict(exclusive=True)], ids=names)
def test_what_left_host_memory_is_hit_on_the_ssd_byte_for_byte(tiering: Tiering) -> None:
    node = TieredNode(tiering, dram_blocks=8, ssd_blocks=20, span_blocks=2)

    async def main() -> None:
        await moved_down(node, CHAIN)
        pin, problem = await node.fetch(CHAIN)
        assert (len(pin), problem) == (6, "")
        assert node.verified(pin) == 6
        node.dram.release(pin)

    node.run(main)
    assert node.events.blocks("hit", "ssd") == 6
    assert node.events.blocks("transfer", "ssd>dram") == 6


def test_write_through_loses_no_block_that_was_seen_once() -> None:
    chains = [tuple(range(10 * n, 10 * n + 5)) for n in range(1, 30)]
    node = TieredNode(WriteThrough(), dram_blocks=8, ssd_blocks=200, span_blocks=3)
    node.run(lambda: written(node, *chains))
    assert all(block in node.ssd for chain in chains for block in chain)
    assert node.events.blocks("evict", "dram") >= 100


def test_only_what_was_hit_goes_down_where_that_is_asked_for() -> None:
    node = TieredNode(WriteThrough(min_hits=1), dram_blocks=8, ssd_blocks=20)

    async def main() -> None:
        await written(node, CHAIN[:3])
        await written(node, CHAIN[:2])
        await node.settled()
        assert [block in node.ssd for block in CHAIN[:3]] == [True, True, False]
        await node.make_room(8)

    node.run(main)


def test_write_back_brings_down_ahead_of_need() -> None:
    node = TieredNode(WriteBack(unsaved=0.25), dram_blocks=16, ssd_blocks=40)

    async def main() -> None:
        await written(node, CHAIN, OTHER)
        await node.settled()
        assert len(node.ssd) >= 12 - 4  # whole chains go
        assert node.events.blocks("evict", "dram") == 0

    node.run(main)


def test_where_a_block_is_decides_and_not_what_is_known_of_it() -> None:
    """Host memory holds the beginning, the SSD all: only the rest is brought up."""
    node = TieredNode(WriteThrough(), dram_blocks=8, ssd_blocks=20)

    async def main() -> None:
        await moved_down(node, CHAIN)
        await written(node, CHAIN[:2])
        pin, _ = await node.fetch(CHAIN)
        assert node.verified(pin) == 6
        node.dram.release(pin)

    node.run(main)
    assert node.events.blocks("transfer", "ssd>dram") == 4


def test_a_promotion_without_room_says_so_and_succeeds_when_there_is_some() -> None:
    node = TieredNode(WriteThrough(), dram_blocks=8, ssd_blocks=20)

    async def main() -> None:
        await moved_down(node, CHAIN)
        in_the_way = await node.write(OTHER)
        pin, problem = await node.fetch(CHAIN)
        assert (len(pin), problem) == (0, NO_ROOM)
        node.dram.release(pin)
        node.dram.release(in_the_way)
        pin, problem = await node.fetch(CHAIN)
        assert (node.verified(pin), problem) == (6, "")
        node.dram.release(pin)

    node.run(main)
    assert [detail.split(":")[0] for kind, _, _, detail in node.events.rows if kind == "promote_failed"] == [NO_ROOM]


def test_a_promotion_waits_for_what_must_be_saved_to_make_it_room() -> None:
    node = TieredNode(OnEvict(), dram_blocks=6, ssd_blocks=20)

    async def main() -> None:
        await moved_down(node, CHAIN)
        await written(node, OTHER)  # fills host memory, and is nowhere else
        pin, problem = await node.fetch(CHAIN)
        assert (node.verified(pin), problem) == (6, "")
        assert all(block in node.ssd for block in OTHER)
        node.dram.release(pin)

    node.run(main)


def test_asking_what_is_there_keeps_nothing_alive() -> None:
    node = TieredNode(WriteThrough(), dram_blocks=8, ssd_blocks=8)

    async def main() -> None:
        await moved_down(node, CHAIN[:4])
        await moved_down(node, OTHER[:4])
        for _ in range(10):
            assert node.promotion.reach(CHAIN[:4]) == 4
        await moved_down(node, (21, 22))
        assert node.promotion.reach(CHAIN[:4]) == 2  # it was the one not used for longest, however often asked for
        assert node.promotion.reach(OTHER[:4]) == 4

    node.run(main)


# Inclusive and exclusive (47)


def hits(tiering: Tiering) -> tuple[int, int]:
    """Blocks found in host memory and on the SSD by three sessions in turn, more than one tier alone can hold."""
    node = TieredNode(tiering, dram_blocks=8, ssd_blocks=8)
    in_memory = 0

    async def main() -> None:
        nonlocal in_memory
        for _ in range(6):
            for chain in (CHAIN[:4], OTHER[:4], (21, 22, 23, 24)):
                in_memory += node.dram.match(chain)
                pin, _ = await node.fetch(chain)
                node.dram.release(pin)
                await written(node, chain)
                await node.settled()

    node.run(main)
    return in_memory, node.events.blocks("hit", "ssd")


def test_exclusive_tiers_hold_more_and_both_are_hit() -> None:
    inclusive, exclusive = hits(WriteThrough()), hits(OnEvict(exclusive=True))
    assert exclusive == (0, 5 * 12)  # all but the first round
    assert inclusive[1] < exclusive[1]


def test_what_was_promoted_leaves_an_exclusive_tier_unless_it_is_continued_there() -> None:
    node = TieredNode(OnEvict(exclusive=True), dram_blocks=8, ssd_blocks=20)

    async def main() -> None:
        await moved_down(node, CHAIN)
        pin, _ = await node.fetch(CHAIN[:3])
        assert len(node.ssd) == 6  # the rest of the chain stands on it
        node.dram.release(pin)
        pin, _ = await node.fetch(CHAIN)
        assert len(node.ssd) == 3
        node.dram.release(pin)
        await node.make_room(8)
        assert len(node.ssd) == 6  # what was its only copy has gone down again

    node.run(main)


# Faults


def test_a_corrupt_block_leaves_the_ssd_and_both_who_want_it_end_right() -> None:
    node = TieredNode(WriteThrough(), dram_blocks=16, ssd_blocks=20, span_blocks=2)
    problems: list[str] = []

    async def one() -> None:
        pin, problem = await node.fetch(CHAIN)
        problems.append(problem)
        assert node.verified(pin) == len(pin) == 3
        node.dram.release(pin)

    async def main() -> None:
        await moved_down(node, CHAIN)
        flip(node, CHAIN[3])
        async with aio.Scope("two") as scope:
            for _ in range(2):
                scope.spawn(one(), "one")
            await aio.sleep_ns(NS_PER_S)
        assert [block in node.ssd for block in CHAIN] == [True] * 3 + [False] * 3
        await written(node, CHAIN)  # computed again, it goes down again
        await node.settled()
        assert len(node.ssd) == 6

    node.run(main)
    assert problems == [CORRUPT, ""]  # the second finds no more than is there


def test_a_block_that_is_corrupt_above_does_not_go_down() -> None:
    node = TieredNode(OnEvict(), dram_blocks=8, ssd_blocks=20)

    async def main() -> None:
        await written(node, CHAIN)
        (slot,) = node.dram.region(CHAIN[2:3]).slots
        node.memory.buffer()[slot, 0] ^= 1
        await node.make_room(8)
        assert [block in node.ssd for block in CHAIN] == [True, True] + [False] * 4

    node.run(main)
    assert node.events.blocks("drop", "dram") == 4


@pytest.mark.parametrize("tiering", [WriteThrough(), OnEvict()], ids=names)
def test_a_transport_that_refuses_a_corrupt_block_need_not_say_which_of_several(tiering: Tiering) -> None:
    """As one does that compares with the header it is about to write: nothing of the span is on the disk then."""
    node = TieredNode(tiering, dram_blocks=8, ssd_blocks=20)
    tier: Any = node.below
    move = tier.move

    async def refuses(copy: Copy) -> CopyResult:
        if bad in copy.source.slots and copy.target.memory is node.disk:
            await aio.sleep_ns(MS)
            raise BlockCorrupt("not what was announced", -1, copy.first_block)
        return await move(copy)

    bad = -1
    tier.move = refuses

    async def main() -> None:
        nonlocal bad
        pin = await node.write(CHAIN)
        (bad,) = node.dram.region(CHAIN[2:3]).slots
        node.dram.release(pin)
        await node.make_room(8)
        assert [block in node.ssd for block in CHAIN] == [True, True] + [False] * 4

    node.run(main)
    assert node.events.blocks("drop", "dram") == 4


def test_two_who_want_the_same_blocks_share_one_way() -> None:
    node = TieredNode(WriteThrough(), dram_blocks=16, ssd_blocks=20, span_blocks=2)

    async def one() -> None:
        pin, _ = await node.fetch(CHAIN)
        assert node.verified(pin) == 6
        node.dram.release(pin)

    async def main() -> None:
        await moved_down(node, CHAIN)
        async with aio.Scope("three") as scope:
            for _ in range(3):
                scope.spawn(one(), "one")
            await aio.sleep_ns(NS_PER_S)

    node.run(main)
    assert node.events.blocks("transfer", "ssd>dram") == 6


def test_who_goes_away_in_mid_promotion_leaves_nothing_behind_and_the_next_goes_on() -> None:
    node = TieredNode(WriteThrough(), dram_blocks=8, ssd_blocks=20, span_blocks=1)

    async def main() -> None:
        await moved_down(node, CHAIN)
        first = aio.spawn(node.fetch(CHAIN), "first")
        second = aio.spawn(node.fetch(CHAIN), "second")
        await aio.sleep_ns(MS // 2)
        await aio.settle(first)
        pin, problem = await second
        assert (node.verified(pin), problem) == (6, "")
        node.dram.release(pin)

    node.run(main)


@pytest.mark.parametrize("faults", [Faults(ssd_failed=1.0), Faults(late=1.0), Faults(lost=1.0)], ids=repr)
def test_a_broken_disk_keeps_nobody_waiting(faults: Faults) -> None:
    node = TieredNode(WriteThrough(), dram_blocks=8, ssd_blocks=20, faults=faults)

    async def main() -> None:
        await written(node, CHAIN)
        start_ns = aio.now_ns()
        await written(node, OTHER)  # which needs the room
        assert aio.now_ns() - start_ns < NS_PER_S

    node.run(main)
    assert node.events.blocks("save_failed", "ssd") > 0
    assert len(node.ssd) == 0


def test_after_an_outage_what_was_to_go_down_goes_down() -> None:
    node = TieredNode(WriteThrough(), dram_blocks=16, ssd_blocks=20)

    async def main() -> None:
        node.outages_ns["n"] = 500 * MS
        await written(node, CHAIN)
        await aio.sleep_ns(NS_PER_S // 4)
        assert len(node.ssd) == 0
        await aio.sleep_ns(2 * NS_PER_S)
        assert len(node.ssd) == 6

    node.run(main)


def test_what_lies_on_a_failing_ssd_counts_as_not_there() -> None:
    node = TieredNode(WriteThrough(), dram_blocks=8, ssd_blocks=20)

    async def main() -> None:
        await moved_down(node, CHAIN)
        node.outages_ns["n"] = aio.now_ns() + 50 * MS
        pin, problem = await node.fetch(CHAIN)
        assert (len(pin), problem) == (0, UNAVAILABLE)
        node.dram.release(pin)
        assert node.promotion.reach(CHAIN) == 0
        await aio.sleep_ns(NS_PER_S)
        assert node.promotion.reach(CHAIN) == 6

    node.run(main)


def test_a_chain_longer_than_the_ssd_leaves_its_end_unsaved_and_nobody_waits_for_ever() -> None:
    node = TieredNode(OnEvict(), dram_blocks=8, ssd_blocks=4, span_blocks=2)
    node.run(lambda: moved_down(node, CHAIN))
    assert [block in node.ssd for block in CHAIN] == [True] * 4 + [False] * 2
    assert any(kind == "save_failed" and "PoolFull" in detail for kind, _, _, detail in node.events.rows)


def test_more_must_leave_at_once_than_the_ssd_holds() -> None:
    """Each block has been below when it leaves; the SSD keeps what it can."""
    chains = [(10 * n, 10 * n + 1) for n in range(1, 9)]
    node = TieredNode(OnEvict(), dram_blocks=16, ssd_blocks=5)
    node.run(lambda: moved_down(node, *chains))
    assert node.events.blocks("insert", "ssd") >= 16
    assert node.events.blocks("save_failed", "ssd") == 0


def test_a_lease_lost_in_mid_promotion_fails_it() -> None:
    """It is looked at when the copy has arrived, as before (25)."""
    node = TieredNode(WriteThrough(), dram_blocks=8, ssd_blocks=20)

    async def main() -> None:
        await moved_down(node, CHAIN)
        lease = node.dram.pin(1, CHAIN, leased=True)
        lease.expires_ns = aio.now_ns() + 1

        async def expire() -> None:
            await aio.sleep_ns(2)
            node.dram.expire()

        task = aio.spawn(expire(), "expiry")
        with pytest.raises(LeaseLost):
            await node.promotion.promote(1, lease, CHAIN)
        await task

    node.run(main)


def test_the_next_process_finds_what_the_last_one_left() -> None:
    before = TieredNode(WriteThrough(), dram_blocks=8, ssd_blocks=20)
    before.run(lambda: written(before, CHAIN, OTHER))
    before.node.fail()
    after = TieredNode(WriteThrough(), 8, 20, disk=DiskStore("n", 20, 16, before.disk.left))

    async def main() -> None:
        for chain in (CHAIN, OTHER):
            pin, _ = await after.fetch(chain)
            assert after.verified(pin) == 6
            after.dram.release(pin)

    after.run(main)


def test_a_copy_that_comes_again_does_not_land_on_pages_that_were_loaded() -> None:
    """They were verified, and may have been written into, or shared, since."""
    node = TieredNode(OnEvict(), dram_blocks=8, ssd_blocks=8, faults=Faults(duplicated=1.0))
    pages = ByteStore("n", Tier.HBM, 6, 16)
    node.node.engine.register(pages)

    async def main() -> None:
        pin = await node.write(CHAIN)
        slots = pages.reserve(6)
        region, checksums = node.dram.region(CHAIN), node.dram.checksums(CHAIN)
        await load(node.node, node.dram, region, checksums, CHAIN, pages.regions(slots), 1)
        pages.buffer()[slots] = 7
        await aio.sleep_ns(NS_PER_S)
        assert (pages.buffer()[slots] == 7).all()
        pages.free(slots)
        node.dram.release(pin)

    node.run(main)


def test_payloads_differ() -> None:
    """Or a wrong block would look right."""
    assert len({payload(block).tobytes() for block in (*CHAIN, *OTHER)}) == 12


# In a cluster


def test_a_session_comes_back_after_its_blocks_have_left_host_memory() -> None:
    """Every output is right, and the row says which tier served."""
    bench = CheckBench("1m", sizes=Sizes(pool_blocks=12, ssd_blocks=60, chunk_tokens=6, max_batch=4))
    first, second = list(range(30)), list(range(100, 130))
    requests = [
        bench.request(number, prompt, 2) for number, prompt in enumerate((first, second, [*first, *range(200, 206)]), 1)
    ]

    async def main(service: Service) -> None:
        for request in requests:
            row = await service.frontend.submit(request).task
            assert row.state is RequestState.COMPLETED
            assert row.output == expected(request, 2)
            await service.cluster.quiesce()
            await aio.sleep_ns(100 * MS)

    bench.run(main)
    last = bench.rows.requests[-1]
    assert last.ssd_tokens > 0
    assert last.hit_tokens >= 28


def test_another_nodes_ssd_serves_what_was_expected_here() -> None:
    """That node brings it up first, and then it is pulled; where there is no room for that, the row says so."""
    bench = CheckBench("2m", sizes=Sizes(pool_blocks=12, ssd_blocks=60, chunk_tokens=6, max_batch=4))
    prompt = bench.request(1, list(range(32)), 1)
    again = bench.request(2, list(range(32)), 1)

    async def main(service: Service) -> None:
        cluster = service.cluster
        await service.frontend.submit(prompt).task
        (holder,) = [name for name, instance in cluster.instances.items() if len(instance.node.pool)]
        (other,) = [name for name in cluster.instances if name != holder]
        node = cluster.instances[holder].node
        await cluster.quiesce()
        node.pool.release(await node.reserve_at(node, -2, 12))
        assert len(node.pool) == 0
        await aio.sleep_ns(50 * MS)  # until that is known
        row = RequestRow(again, tuple(node.ssd.contents()) if node.ssd else ())
        job = Job(again, row.blocks, SLO(1.0, 1.0), row, [cast("Output", SimpleNamespace(produced=0))])
        placement = Placement(other, other, None, 32, 32, "", 0.0, 0.0, Decision(0, 2, "prefill", "", other))
        fetcher: Any = cluster.instances[other]._fetcher
        pin, lookup = await fetcher.fetch(job, placement)
        assert (len(pin), lookup.ssd, lookup.remote) == (8, 8, 0)
        here, there = (cluster.instances[name].node.pool.checksums(pin.blocks) for name in (other, holder))
        assert here == there
        cluster.instances[other].node.pool.release(pin)

    bench.run(main)
    (fetched,) = [decision for decision in bench.rows.decisions if decision.stage == "fetch"]
    assert fetched.choice.endswith(f"/{Tier.SSD}")
    assert fetched.outcome == "moved"


def test_a_prefetch_that_was_skipped_is_a_miss_by_that_name() -> None:
    """Both slots' worth of host memory are held by others while the session comes back."""
    bench = CheckBench("1m", sizes=Sizes(pool_blocks=14, ssd_blocks=60, chunk_tokens=6, max_batch=4))
    first = bench.request(1, list(range(20)), 1)
    again = bench.request(2, list(range(20)), 1)

    async def main(service: Service) -> None:
        await service.frontend.submit(first).task
        await service.cluster.quiesce()
        (node,) = service.cluster.nodes.values()
        everything = await node.reserve_at(node, -2, 14)
        await aio.sleep_ns(50 * MS)
        ticket = service.frontend.submit(again)
        await aio.sleep_ns(500 * MS)
        node.pool.release(everything)
        row = await ticket.task
        assert row.state is RequestState.COMPLETED
        assert row.output == expected(again, 1)

    bench.run(main)
    row = bench.rows.requests[-1]
    assert row.missed_tokens == {Miss.SKIPPED: 20}
    assert row.skip_reason == NO_ROOM


def test_rotten_blocks_are_computed_again() -> None:
    bench = CheckBench("1m", sizes=Sizes(pool_blocks=12, ssd_blocks=60, chunk_tokens=6, max_batch=4))
    first, second = bench.request(1, list(range(30)), 2), bench.request(2, list(range(30)), 2)

    async def main(service: Service) -> None:
        await service.frontend.submit(first).task
        await service.cluster.quiesce()
        (node,) = service.cluster.nodes.values()
        node.pool.release(await node.reserve_at(node, -2, 12))
        await aio.sleep_ns(50 * MS)
        for disk in bench.world.disks.values():
            disk.buffer()[disk.resting()[3], 0] ^= 1
        row = await service.frontend.submit(second).task
        assert row.output == expected(second, 2)

    bench.run(main)
    row = bench.rows.requests[-1]
    assert row.ssd_tokens == 3 * 4
    assert row.missed_tokens is not None
    assert row.missed_tokens[Miss.FAULT] > 0
    assert np.sum([event[1] == "drop" for event in bench.rows.events]) == 1
