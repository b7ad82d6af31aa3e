"""A request's life, cut short at every stage: by its client, or by the death of an instance. Nothing may stay held."""

from __future__ import annotations

import asyncio
import functools

import pytest
from engine_fixtures import CheckBench, expected
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax import aio
from mcjax.engine.cluster_spec import InstanceSpec
from mcjax.engine.service import Service
from mcjax.types import NS_PER_S, RequestRow, RequestState

PROMPT = list(range(1, 23))  # 22 tokens: five full blocks, a partial one, four chunks
CLUSTERS = ["1p1d", "2p2d", "1m", "1p1d+1m"]
OUTPUT = 9


async def play(bench: CheckBench, service: Service, cancel_ns: int | None) -> list[RequestRow]:
    """A first request; a second with the same prefix, cancelled at a time; a third, which must still be right."""
    first = service.frontend.submit(bench.request(1, PROMPT[:9], OUTPUT))
    await aio.sleep_ns(NS_PER_S // 20)
    second = service.frontend.submit(bench.request(2, PROMPT, OUTPUT))
    beside = service.frontend.submit(bench.request(4, [*PROMPT[:6], 77, 78, 79], OUTPUT))
    if cancel_ns is not None:
        aio.clock().call_at_ns(aio.now_ns() + cancel_ns, second.cancel)
    rows = [await first.task, await second.task, await beside.task]
    third = service.frontend.submit(bench.request(3, PROMPT, OUTPUT))
    return [*rows, await third.task]


def check_tokens(row: RequestRow) -> None:
    """Whatever became of it, what the client got is a prefix of the right answer; all of it if it completed."""
    assert row.output is not None
    right = expected(row.request, OUTPUT)
    assert row.output == right[: len(row.output)]
    assert row.output_tokens == len(row.output) == sum(len(piece) for piece in row.token_ends_ns)
    if row.state is RequestState.COMPLETED:
        assert row.output == right


@functools.cache
def life_ns(cluster: str, seed: int) -> int:
    """How long the second request lives when nobody disturbs it."""
    bench = CheckBench(cluster, seed=seed)
    rows: list[RequestRow] = []

    async def main(service: Service) -> None:
        rows.extend(await play(bench, service, None))

    bench.run(main)
    for row in rows:
        assert row.state is RequestState.COMPLETED
        check_tokens(row)
    return rows[1].finish_ns - NS_PER_S // 20


@pytest.mark.parametrize("cluster", CLUSTERS)
@settings(max_examples=15)
@given(share=st.floats(0.0, 1.05), seed=st.integers(0, 3))
def test_a_client_may_go_away_at_any_moment(cluster: str, share: float, seed: int) -> None:
    bench = CheckBench(cluster, seed=seed)

    async def main(service: Service) -> None:
        first, second, beside, third = await play(bench, service, 1 + round(life_ns(cluster, seed) * share))
        assert second.state in (RequestState.CANCELLED, RequestState.COMPLETED)
        for row in (first, beside, third):
            assert row.state is RequestState.COMPLETED, "the others are not concerned"
        for row in (first, second, beside, third):
            check_tokens(row)

    bench.run(main)
    assert sorted(row.request.request_id for row in bench.rows.requests) == [1, 2, 3, 4], "each ends exactly once"


@pytest.mark.parametrize("cluster", ["1p1d", "1m"])
@settings(max_examples=8)
@given(tokens=st.integers(1, OUTPUT), seed=st.integers(0, 3))
def test_a_client_may_go_away_from_inside_its_own_stream(cluster: str, tokens: int, seed: int) -> None:
    """It has seen enough: the cancel comes while the tokens are being handed to it."""
    bench = CheckBench(cluster, seed=seed, max_steps=1)

    async def main(service: Service) -> None:
        seen = 0

        def listen(_: object, ends_ns: object) -> None:
            nonlocal seen
            seen += 1
            if seen == tokens:
                ticket.cancel()

        ticket = service.frontend.submit(bench.request(1, PROMPT, OUTPUT), listen)
        row = await ticket.task
        check_tokens(row)
        assert row.state is RequestState.CANCELLED or tokens == OUTPUT

    bench.run(main)


def instances(cluster: str) -> list[str]:
    return {"1p1d": ["p0", "d0"], "2p2d": ["p0", "p1", "d0", "d1"], "1m": ["m0"], "2m": ["m0", "m1"]}[cluster]


@pytest.mark.parametrize(
    ("cluster", "victim"), [(cluster, name) for cluster in ("1p1d", "2p2d", "1m", "2m") for name in instances(cluster)]
)
@settings(max_examples=8)
@given(share=st.floats(0.0, 1.05), seed=st.integers(0, 3))
def test_an_instance_may_die_at_any_moment(cluster: str, victim: str, share: float, seed: int) -> None:
    """Every request completes with the right tokens, within a bound, whoever dies; the survivors hold nothing."""
    bench = CheckBench(cluster, seed=seed)
    rows: list[RequestRow] = []

    async def main(service: Service) -> None:
        life = life_ns(cluster, seed)
        successor = InstanceSpec(f"{victim}b", service.cluster.instances[victim].role)
        when_ns = NS_PER_S // 20 + 1 + round(life * share)
        aio.clock().call_at_ns(when_ns, service.cluster.kill, victim)
        aio.clock().call_at_ns(when_ns + NS_PER_S // 50, service.cluster.join, successor)
        rows.extend(await play(bench, service, None))

    bench.run(main)
    for row in rows:
        assert row.state is RequestState.COMPLETED, row.reason
        check_tokens(row)
    assert rows[1].finish_ns < 3 * NS_PER_S


@settings(max_examples=8)
@given(share=st.floats(0.0, 1.0), seed=st.integers(0, 3), cancel=st.floats(0.0, 1.0))
def test_a_death_and_a_cancel_together(share: float, seed: int, cancel: float) -> None:
    """The sender dies, the client gives up: what the receiver held for them comes back with the lease."""
    bench = CheckBench("2p2d", seed=seed)

    async def main(service: Service) -> None:
        life = life_ns("2p2d", seed)
        for name in ("p0", "d1"):
            aio.clock().call_at_ns(NS_PER_S // 20 + 1 + round(life * share), service.cluster.kill, name)
        rows = await play(bench, service, 1 + round(life * cancel))
        assert all(row.state in (RequestState.COMPLETED, RequestState.CANCELLED) for row in rows)
        for row in rows:
            check_tokens(row)

    bench.run(main)


def test_draining_while_requests_run_loses_nothing() -> None:
    bench = CheckBench("2p2d")

    async def main(service: Service) -> None:
        tickets = [service.frontend.submit(bench.request(number, [number, *PROMPT], OUTPUT)) for number in range(1, 9)]
        await aio.sleep_ns(NS_PER_S // 200)
        for name in ("p0", "d0"):
            await service.cluster.drain(name)
        for ticket in tickets:
            row = await ticket.task
            assert row.state is RequestState.COMPLETED
            assert row.attempts == 1
            check_tokens(row)
        assert list(service.cluster.instances) == ["p1", "d1"]

    bench.run(main)


@pytest.mark.parametrize("cluster", ["1p1d", "1m"])
def test_a_retried_request_counts_once_for_hits(cluster: str) -> None:
    """Random prompts hit nothing, however often a request is computed again; a real hit is its first attempt's."""
    bench = CheckBench(cluster)

    async def main(service: Service) -> None:
        name = "m0" if cluster == "1m" else "d0"
        aio.clock().call_at_ns(NS_PER_S // 100, service.cluster.kill, name)
        spec = InstanceSpec(f"{name}b", service.cluster.instances[name].role)
        aio.clock().call_at_ns(NS_PER_S // 50, service.cluster.join, spec)
        row = await service.frontend.submit(bench.request(1, PROMPT, OUTPUT)).task
        assert row.state is RequestState.COMPLETED
        assert row.attempts > 1, "the death must have hit it, or this shows nothing"
        assert row.local_tokens + row.remote_tokens == 0, "its own blocks of the attempt before are no hit"
        again = await service.frontend.submit(bench.request(2, PROMPT, OUTPUT)).task
        assert (again.local_tokens, again.remote_tokens) == (20, 0)
        assert again.attempts == 1

    bench.run(main)
    assert len(bench.rows.requests) == 2


def test_what_was_expected_of_a_prefix_and_what_was_found_are_both_told() -> None:
    """Routed (in the decision) and delivered (in the request's row) tokens stand beside what there was to have."""
    bench = CheckBench("1p1d")

    async def main(service: Service) -> None:
        await service.frontend.submit(bench.request(1, PROMPT, OUTPUT)).task
        await aio.sleep_ns(NS_PER_S // 10)
        await service.frontend.submit(bench.request(2, PROMPT, OUTPUT)).task

    bench.run(main)
    routed = [decision.reused_tokens for decision in bench.rows.decisions if decision.stage == "prefill"]
    delivered = [row.local_tokens + row.remote_tokens for row in bench.rows.requests]
    assert routed == delivered == [0, 20]


def test_a_ticket_cancelled_before_its_first_step_still_ends_once() -> None:
    bench = CheckBench("1p1d")

    async def main(service: Service) -> None:
        ticket = service.frontend.submit(bench.request(1, PROMPT, OUTPUT))
        ticket.cancel()
        try:
            await ticket.task
        except asyncio.CancelledError:
            pytest.fail("whoever waits for a ticket is told how the request ended")
        assert service.frontend.ended == 1
        assert not service.frontend.running

    bench.run(main)


@pytest.mark.parametrize("times", [2, 3, 4])
@pytest.mark.parametrize("gap", [0, 1])
def test_an_impatient_client_may_cancel_as_often_as_it_likes(times: int, gap: int) -> None:
    bench = CheckBench("1p1d")

    async def main(service: Service) -> None:
        ticket = service.frontend.submit(bench.request(1, PROMPT, OUTPUT))
        await aio.sleep_ns(life_ns("1p1d", 0) // 2)
        for _ in range(times):
            ticket.cancel()
            await aio.sleep_ns(gap) if gap else await asyncio.sleep(0)
        assert (await ticket.task).state is RequestState.CANCELLED

    bench.run(main)
