"""The device tier: blocks stay in pages that nobody needs, later requests read them in place, and nobody ever writes
into them. Every millisecond the bytes of every block on every device are compared with what they must be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from engine_fixtures import MS, CheckBench, Rows, expected
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax import aio
from mcjax.backends.check.digests import entry
from mcjax.backends.check.world import Sizes
from mcjax.engine.cluster_spec import InstanceSpec
from mcjax.engine.decoder import Decoder, Preemption
from mcjax.engine.frontend import Ticket
from mcjax.engine.pages import Held, Pages
from mcjax.engine.service import Service
from mcjax.types import Request, RequestRow, RequestState, Sampling

BLOCK = 4
PROMPT = list(range(1, 23))
"""Five full blocks and two tokens more."""
OUTPUT = 9


@dataclass
class Truth:
    """What the bytes of each block must be, of all requests so far."""

    bench: CheckBench
    blocks: dict[int, bytes] = field(default_factory=dict[int, bytes])
    seen: int = 0

    def add(self, service: Service, request: Request, output_tokens: int) -> None:
        for output in range(request.sampling.n):
            made = expected(request, output_tokens, output)
            assert request.tokens is not None
            tokens = np.array([*request.tokens.tolist(), *made], np.int32)
            entries, before = b"", b""
            for token in tokens.tolist():
                before = entry(before, token)
                entries += before
            size = len(before) * BLOCK
            for at, block in enumerate(service.frontend._namer.from_tokens(request.tenant, tokens)):
                self.blocks[block] = entries[at * size : (at + 1) * size]

    def check(self, service: Service) -> None:
        for instance in service.cluster.instances.values():
            pool = instance.pages.pool
            buffer = pool.store.buffer()
            assert buffer is not None
            for block in pool.contents():
                (slot,) = pool.region([block]).slots
                assert buffer[slot].tobytes() == self.blocks[block], f"{instance.name}: block {block} was written into"
                self.seen += 1


def bench_of(cluster: str, **values: Any) -> tuple[CheckBench, Truth]:
    bench = CheckBench(cluster, hbm_cache=True, **values)
    truth = Truth(bench)
    bench.look = truth.check
    return bench, truth


def submit(
    bench: CheckBench,
    truth: Truth,
    service: Service,
    number: int,
    prompt: Sequence[int],
    output: int,
    max_tokens: int = 30,
    **values: Any,
) -> Ticket:
    request = bench.request(number, prompt, output, max_tokens, **values)
    truth.add(service, request, output)
    return service.frontend.submit(request)


def check(row: RequestRow, output_tokens: int) -> None:
    assert row.state is RequestState.COMPLETED, row.reason
    outputs = [row.output, *[branch.output for branch in row.branches]]
    for index, output in enumerate(outputs):
        assert output == expected(row.request, output_tokens, index), index


def of(rows: Rows, kind: str, request_id: int | None = None) -> list[dict[str, Any]]:
    """The events of a kind, of one request."""
    return [
        {"place": event[3], **dict(event[4:])}
        for event in rows.events
        if event[1] == kind and request_id in (None, event[2])
    ]


def moved(rows: Rows, request_id: int, tiers: str) -> int:
    """Blocks that a request moved between tiers."""
    return sum(event["blocks"] for event in of(rows, "transfer", request_id) if event["tier"] == tiers)


def computed(rows: Rows, request_id: int) -> int:
    return sum(event["tokens"] for event in of(rows, "prefill_step", request_id))


def play(bench: CheckBench, truth: Truth, *prompts: Sequence[int], output: int = OUTPUT, **values: Any) -> Rows:
    """One request after the other."""

    async def main(service: Service) -> None:
        for number, prompt in enumerate(prompts, 1):
            check(await submit(bench, truth, service, number, prompt, output, **values).task, output)

    bench.run(main)
    assert truth.seen, "blocks on a device, and they were looked at"
    return bench.rows


@pytest.mark.parametrize("cluster", ["1m", "1p1d"])
def test_a_second_request_reads_the_firsts_blocks_in_place(cluster: str) -> None:
    rows = play(*bench_of(cluster), PROMPT, [*PROMPT[:20], 77, 78, 79])
    first, second = rows.requests
    assert (first.hbm_tokens, second.hbm_tokens) == (0, 20)
    assert second.local_tokens + second.remote_tokens == 0, "what the device has counts there, and nowhere else"
    assert computed(rows, 2) == 3
    # A decode instance's device has them too: it loads the last, partial block alone.
    assert moved(rows, 2, "dram>hbm") == (1 if cluster == "1p1d" else 0)
    assert {event["place"] for event in of(rows, "hit", 2) if event["tier"] == "hbm"} == (
        {"node-p0", "node-d0"} if cluster == "1p1d" else {"node-m0"}
    )


@pytest.mark.parametrize("cluster", ["1m", "1p1d"])
def test_of_a_prompt_that_is_all_there_exactly_the_last_token_is_computed(cluster: str) -> None:
    """The page that it is written into is copied before: the others are shared."""
    bench, truth = bench_of(cluster)
    rows = play(bench, truth, PROMPT[:20], PROMPT[:20])
    assert rows.requests[1].hbm_tokens == 20
    assert [computed(rows, number) for number in (1, 2)] == [20, 1]
    assert moved(rows, 2, "hbm>hbm") == 1
    assert moved(rows, 2, "dram>hbm") == 0


def test_requests_at_the_same_time_share_pages() -> None:
    bench, truth = bench_of("1m")
    seen: list[list[list[int]]] = []

    async def main(service: Service) -> None:
        executor = bench.world.executors["m0"]
        run = executor.run

        async def spied(plan, max_steps, on_step=None):
            seen.append([list(item.pages) for item in plan.items if item.kind.value == "decode"])
            return await run(plan, max_steps, on_step)

        executor.run = spied  # pyright: ignore[reportAttributeAccessIssue]
        tickets = [submit(bench, truth, service, 1, PROMPT, 20)]
        await aio.sleep_ns(30 * MS)
        tickets += [submit(bench, truth, service, number, PROMPT, 20) for number in (2, 3)]
        for ticket in tickets:
            check(await ticket.task, 20)

    bench.run(main)
    together = max(seen, key=len)
    assert len(together) == 3
    assert len({tuple(pages[:5]) for pages in together}) == 1
    own = Counter(page for pages in together for page in pages[5:])
    assert max(own.values()) == 1
    found = {row.request.request_id: row.hbm_tokens for row in bench.rows.requests}
    assert found == {1: 0, 2: 20, 3: 20}


@pytest.mark.parametrize("cluster", ["1m", "1p1d"])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:20]])
def test_blocks_that_host_memory_lost_come_from_the_pages(cluster: str, prompt: list[int]) -> None:
    """They go to the own pool again, and on to whoever decodes, as if they had just been computed."""
    bench, truth = bench_of(cluster)

    async def main(service: Service) -> None:
        row = await submit(bench, truth, service, 1, prompt, OUTPUT).task
        check(row, OUTPUT)
        names = row.blocks
        nodes = service.cluster.nodes.values()
        before = [node.pool.contents() for node in nodes]
        for node in nodes:
            node.pool.drop(names)
            assert not len(node.pool)
        row = await submit(bench, truth, service, 2, prompt, OUTPUT).task
        check(row, OUTPUT)
        assert row.hbm_tokens == 20
        for node, contents in zip(nodes, before, strict=True):
            again = node.pool.contents()
            assert {name: again[name] for name in names} == {name: contents[name] for name in names}

    bench.run(main)
    assert computed(bench.rows, 2) == max(1, len(prompt) - 20)


def test_a_longer_prefix_in_host_memory_is_loaded_behind_what_the_device_has() -> None:
    bench, truth = bench_of("1m")

    async def main(service: Service) -> None:
        row = await submit(bench, truth, service, 1, PROMPT, OUTPUT).task
        check(row, OUTPUT)
        service.cluster.instances["m0"].pages.pool.drop(row.blocks[2:])
        row = await submit(bench, truth, service, 2, PROMPT, OUTPUT).task
        check(row, OUTPUT)
        assert (row.hbm_tokens, row.local_tokens) == (8, 12)

    bench.run(main)
    assert moved(bench.rows, 2, "dram>hbm") == 3
    assert computed(bench.rows, 2) == 2


def test_blocks_leave_when_pages_are_needed() -> None:
    """Prompts that have nothing in common, one after the other, on a device that holds two of them."""
    bench, truth = bench_of("1m", sizes=Sizes(pages=14, chunk_tokens=6))
    prompts = [[100 * number + token for token in range(22)] for number in range(6)]
    rows = play(bench, truth, *prompts)
    gone = [event for event in of(rows, "evict") if event["tier"] == "hbm"]
    assert sum(event["blocks"] for event in gone) > 20
    assert {row.attempts for row in rows.requests} == {1}


def test_whoever_takes_all_pages_gets_them_whatever_is_cached() -> None:
    """20 + 30 tokens need all 13 pages. Its prefix is there, but there is no page to copy its last block into."""
    bench, truth = bench_of("1m", sizes=Sizes(pages=13, chunk_tokens=6))
    rows = play(bench, truth, PROMPT[:20], PROMPT[:20], output=30)
    second = rows.requests[1]
    assert (second.hbm_tokens, second.local_tokens) == (16, 4)
    assert computed(rows, 2) == 1


def test_who_waits_pins_nothing() -> None:
    """Each waiter's prefix is on the device, and together they are all there is: if they pinned it, nobody went on."""
    bench, truth = bench_of("1m", sizes=Sizes(pages=20, chunk_tokens=6, max_batch=8))
    prompts = [[100 * number + token for token in range(9)] for number in range(7)]

    async def main(service: Service) -> None:
        for number, prompt in enumerate(prompts):
            check(await submit(bench, truth, service, number, prompt, 5).task, 5)
        tickets = [submit(bench, truth, service, 10 + at, prompt, 8) for at, prompt in enumerate(prompts)]
        for ticket in tickets:
            check(await ticket.task, 8)

    bench.run(main)
    assert {row.attempts for row in bench.rows.requests} == {1}


def test_what_is_free_or_cached_is_reported_as_free() -> None:
    bench, truth = bench_of("1p1d")

    async def main(service: Service) -> None:
        instances = service.cluster.instances.values()
        check(await submit(bench, truth, service, 1, PROMPT, OUTPUT).task, OUTPUT)
        for instance in instances:
            assert len(instance.pages.pool) > 0
            assert instance.pages.available == instance.pages.store.capacity
        await aio.sleep_ns(50 * MS)
        service.conductor.refresh()
        view = service.conductor.state.view(aio.now_ns(), 0, ())
        assert view.decode.free_tokens.tolist() == [48 * BLOCK]

    bench.run(main)


@pytest.mark.parametrize("cluster", ["1m", "1p1d"])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:20], PROMPT[:3]])
def test_several_outputs_share_what_the_device_has(cluster: str, prompt: list[int]) -> None:
    bench, truth = bench_of(cluster)
    rows = play(bench, truth, prompt, prompt, prompt, sampling=Sampling(n=3, temperature=1.0, seed=5))
    full = len(prompt) // BLOCK * BLOCK
    assert [row.hbm_tokens for row in rows.requests] == [0, full, full]
    assert computed(rows, 3) == max(1, len(prompt) - full)


def test_blocks_that_decode_filled_are_found_by_the_next_turn() -> None:
    bench, truth = bench_of("1m")
    reply = expected(bench.request(0, PROMPT, OUTPUT), OUTPUT)
    rows = play(bench, truth, PROMPT, [*PROMPT, *reply, 7])
    assert rows.requests[1].hbm_tokens == (len(PROMPT) + OUTPUT - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("cluster", ["1m", "1p1d"])
def test_blocks_that_decode_filled_have_no_name_where_their_bits_tell_who_made_them(cluster: str) -> None:
    bench, truth = bench_of(cluster, shares_decoded=False)

    async def main(service: Service) -> None:
        row = await submit(bench, truth, service, 1, PROMPT, OUTPUT).task
        check(row, OUTPUT)
        for instance in service.cluster.instances.values():
            assert tuple(instance.pages.pool.contents()) == row.blocks

    bench.run(main)


@pytest.mark.parametrize("cluster", ["1m", "1p1d"])
def test_nothing_of_a_prompt_that_gave_no_numbers_stays(cluster: str) -> None:
    bench, truth = bench_of(cluster)

    async def main(service: Service) -> None:
        ticket = submit(bench, truth, service, 1, PROMPT, OUTPUT)
        for executor in bench.world.executors.values():
            executor.to_break[1] = None
        assert (await ticket.task).state is RequestState.FAILED
        for instance in service.cluster.instances.values():
            assert not len(instance.pages.pool)

    bench.run(main)


@pytest.mark.parametrize("cluster", ["1m", "1p1d"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_who_makes_room_keeps_nothing_and_finds_its_prefix_again(cluster: str, preemption: Preemption) -> None:
    bench, truth = bench_of(
        cluster,
        sizes=Sizes(pages=16, chunk_tokens=6),
        headroom_tokens=1,
        preemption=preemption,
        attempts=1,
    )
    common = list(range(1, 10))

    async def main(service: Service) -> None:
        check(await submit(bench, truth, service, 0, common, 2).task, 2)
        tickets = [
            submit(bench, truth, service, number, [*common, *range(50 * number, 50 * number + length)], 28)
            for number, length in ((1, 9), (2, 8), (3, 10))
        ]
        for ticket in tickets:
            check(await ticket.task, 28)

    bench.run(main)
    preempted = [event[2] for event in bench.rows.events if event[1] == "preempt"]
    assert preempted
    if preemption == "swap":
        out, back = (
            sum(moved(bench.rows, number, way) for number in set(preempted)) for way in ("hbm>dram", "dram>hbm")
        )
        assert back < out
        assert not of(bench.rows, "recompute")


@dataclass(frozen=True)
class Act:
    """A request, and what else happens."""

    prefix: int
    suffix: int
    output: int
    outputs: int
    gap_ms: int
    harm: str


ACTS = st.builds(
    Act,
    prefix=st.integers(0, 24),
    suffix=st.integers(0, 8),
    output=st.integers(1, 20),
    outputs=st.sampled_from([1, 1, 1, 2, 3]),
    gap_ms=st.sampled_from([0, 1, 5, 40]),
    harm=st.sampled_from(["", "", "", "", "", "cancel", "kill"]),
)


@settings(max_examples=60, deadline=None)
@given(
    cluster=st.sampled_from(["1m", "1p1d", "2m", "2p1d", "1p1d+1m"]),
    pages=st.integers(46, 60),
    pool_blocks=st.integers(20, 60),
    headroom=st.sampled_from([None, 1, 4]),
    preemption=st.sampled_from(["swap", "recompute"]),
    shares=st.booleans(),
    acts=st.lists(ACTS, min_size=2, max_size=8),
)
def test_any_workload(
    cluster: str,
    pages: int,
    pool_blocks: int,
    headroom: int | None,
    preemption: Preemption,
    shares: bool,
    acts: list[Act],
) -> None:
    """Prompts begin alike; whoever goes away or dies, tokens and bytes are right at all times."""
    sizes = Sizes(pages=pages, pool_blocks=pool_blocks, chunk_tokens=7, max_batch=4)
    bench, truth = bench_of(
        cluster, sizes=sizes, headroom_tokens=headroom, preemption=preemption, shares_decoded=shares, attempts=40
    )

    async def main(service: Service) -> None:
        tickets: list[tuple[Ticket, Act]] = []
        for number, act in enumerate(acts):
            prompt = [*range(1, act.prefix + 1), *[90 + number] * act.suffix] or [7]
            sampling = Sampling(n=act.outputs, temperature=1.0, seed=number)
            ticket = submit(bench, truth, service, number, prompt, act.output, sampling=sampling)
            tickets.append((ticket, act))
            await aio.sleep_ns(act.gap_ms * MS)
            if act.harm == "cancel":
                ticket.cancel()
            elif act.harm == "kill" and service.cluster.instances:
                name = list(service.cluster.instances)[number % len(service.cluster.instances)]
                role = service.cluster.instances[name].role
                service.cluster.kill(name)
                aio.clock().call_at_ns(aio.now_ns() + MS, service.cluster.join, InstanceSpec(f"{name}{number}", role))
        for ticket, act in tickets:
            row = await ticket.task
            if row.state is RequestState.CANCELLED:
                assert act.harm == "cancel"
            else:
                check(row, act.output)

    bench.run(main)


def shares_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of a cached prompt's last token is not copied."""
    take = Pages.take

    async def wrong(
        self: Pages, owner: int, count: int, blocks: Sequence[int] = (), most: int = 0, *more: bool
    ) -> Held:
        return await take(self, owner, count, blocks, len(blocks), *more)

    monkeypatch.setattr(Pages, "take", wrong)


def keeps_the_page_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's last block, which each of several outputs writes into, counts among those that none does."""
    monkeypatch.setattr(Decoder, "untouched", lambda self, job: job.blocks)
    monkeypatch.setattr(Decoder, "_shared", lambda self, job: len(job.blocks) if len(job.outputs) > 1 else 0)


def unpins_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request goes on reading is not kept for it."""
    keep = Pages.keep

    def wrong(self: Pages, held: Held, blocks: Sequence[int], *more: bool) -> None:
        keep(self, held, blocks, *more)
        if held.pin is not None:
            self.pool.narrow(held.pin, 0)
            self._follow(held)

    monkeypatch.setattr(Pages, "keep", wrong)


@pytest.mark.parametrize(
    ("bug", "outputs", "apart", "gap_ms"),
    [(shares_what_it_writes, 1, False, 60), (keeps_the_page_it_writes, 3, False, 60), (unpins_too_early, 1, True, 2)],
)
def test_a_seeded_bug_is_found(
    bug: Any, outputs: int, apart: bool, gap_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same requests are all right without it."""

    def serve() -> list[str]:
        bench, truth = bench_of("1m", sizes=Sizes(pages=26, chunk_tokens=6, max_batch=8))
        problems: list[str] = []

        async def main(service: Service) -> None:
            tickets: list[Ticket] = []
            for number in range(6):
                prompt = list(range(100 * number * apart, 100 * number * apart + 20))
                sampling = Sampling(n=outputs, temperature=1.0, seed=3)
                tickets.append(submit(bench, truth, service, number, prompt, 12, 12, sampling=sampling))
                await aio.sleep_ns(gap_ms * MS)
            for ticket in tickets:
                row = await ticket.task
                given = [row.output, *[branch.output for branch in row.branches]]
                if row.state is not RequestState.COMPLETED:
                    problems.append(row.reason)
                elif given != [expected(row.request, 12, at) for at in range(outputs)]:
                    problems.append("wrong")

        try:
            bench.run(main)
        except AssertionError as problem:
            problems.append(str(problem))
        return problems

    assert serve() == []
    bug(monkeypatch)
    assert serve()
