"""Executors that raise, lose their pages, or give a sequence no numbers: whom it concerns is told, and nobody else."""

from __future__ import annotations

import re

import pytest
from engine_fixtures import MS, CheckBench, expected
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax import aio
from mcjax.engine.service import Service
from mcjax.errors import ExecutorFailed
from mcjax.types import NS_PER_S, RequestState, Sampling

PROMPT = list(range(1, 23))
OUTPUT = 9
CLUSTERS = {"1p1d": ("p0", "d0"), "1m": ("m0", "m0")}
LONGEST_MS = 60
LONGEST_STEP_MS = 4


@pytest.mark.parametrize("cluster", CLUSTERS)
@settings(max_examples=15)
@given(after_ms=st.integers(0, LONGEST_MS), seed=st.integers(0, 3))
def test_numbers_that_are_none_end_one_request_and_no_other(cluster: str, after_ms: int, seed: int) -> None:
    bench = CheckBench(cluster, seed=seed)

    async def main(service: Service) -> None:
        tickets = [service.frontend.submit(bench.request(n, [*PROMPT[: 5 * n], n], OUTPUT)) for n in range(1, 4)]
        await aio.sleep_ns(after_ms * MS)
        for executor in bench.world.executors.values():
            executor.to_break[2] = None
        rows = [await ticket.task for ticket in tickets]
        assert [row.state for row in rows if row.request.request_id != 2] == [RequestState.COMPLETED] * 2
        if rows[1].state is not RequestState.COMPLETED:
            assert rows[1].reason == "request 2: its output broke off: its logits are not numbers"
            assert rows[1].attempts == 1, "trying again would give the same"
        for row in rows:
            assert row.output == expected(row.request, OUTPUT)[: row.output_tokens]

    bench.run(main)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_nobody_matches_the_blocks_of_a_broken_prompt(cluster: str) -> None:
    bench = CheckBench(cluster)

    async def main(service: Service) -> None:
        ticket = service.frontend.submit(bench.request(1, PROMPT, OUTPUT))
        while not any(len(node.pool) for node in service.cluster.nodes.values()):
            await aio.sleep_ns(MS // 10)
        executor = bench.world.executors[CLUSTERS[cluster][0]]
        executor.to_break[1] = None
        assert (await ticket.task).state is RequestState.FAILED
        assert [len(node.pool) for node in service.cluster.nodes.values()] == [0] * len(service.cluster.nodes)
        executor.to_break.clear()
        await aio.sleep_ns(NS_PER_S // 10)
        row = await service.frontend.submit(bench.request(2, PROMPT, OUTPUT)).task
        assert row.local_tokens + row.remote_tokens == 0
        assert row.output == expected(row.request, OUTPUT)

    bench.run(main)


@pytest.mark.parametrize("cluster", CLUSTERS)
@settings(max_examples=10)
@given(after_ms=st.integers(0, LONGEST_MS), seed=st.integers(0, 3))
def test_a_plan_that_raises_costs_its_sequences_an_attempt(cluster: str, after_ms: int, seed: int) -> None:
    bench = CheckBench(cluster, seed=seed)

    async def main(service: Service) -> None:
        tickets = [service.frontend.submit(bench.request(n, [*PROMPT[: 5 * n], n], OUTPUT)) for n in range(1, 4)]
        await aio.sleep_ns(after_ms * MS)
        for executor in bench.world.executors.values():
            executor.problem = ExecutorFailed("MemoryError: no room")
        for ticket in tickets:
            row = await ticket.task
            assert row.state is RequestState.COMPLETED
            assert row.attempts <= 3
            assert row.output == expected(row.request, OUTPUT)
        assert len(service.cluster.instances) == len(set(CLUSTERS[cluster])), "nobody died of it"

    bench.run(main)


@pytest.mark.parametrize(("cluster", "victim"), [("2p2d", "p0"), ("2p2d", "d0"), ("2m", "m0")])
@settings(max_examples=10)
@given(after_ms=st.integers(0, LONGEST_MS), seed=st.integers(0, 3))
def test_lost_pages_are_a_death_that_everybody_hears_of_at_once(
    cluster: str, victim: str, after_ms: int, seed: int
) -> None:
    bench = CheckBench(cluster, seed=seed)

    async def main(service: Service) -> None:
        tickets = [service.frontend.submit(bench.request(n, [*PROMPT[: 4 * n], n], OUTPUT)) for n in range(1, 6)]
        await aio.sleep_ns(after_ms * MS)
        bench.world.executors[victim].problem = ExecutorFailed("RuntimeError: device lost", lost_pages=True)
        for ticket in tickets:
            row = await ticket.task
            assert row.state is RequestState.COMPLETED, row.reason
            assert row.attempts <= 2
            assert row.output == expected(row.request, OUTPUT)

    bench.run(main)
    deaths = [event[0] for event in bench.rows.events if event[1] == "death"]
    retries = [event[0] for event in bench.rows.events if event[1] == "retry"]
    assert len(deaths) <= 1
    late = [time_ns for time_ns in retries if time_ns - deaths[0] > LONGEST_STEP_MS * MS]
    assert not late, "told at once, or as soon as the step that uses its pages is over"


@pytest.mark.parametrize(("cluster", "victim"), [("2p2d", "p0"), ("2p2d", "d0"), ("2m", "m0")])
@settings(max_examples=10)
@given(after_ms=st.integers(0, LONGEST_MS), seed=st.integers(0, 3))
def test_a_process_that_is_gone_costs_its_requests_an_attempt_at_once(
    cluster: str, victim: str, after_ms: int, seed: int
) -> None:
    bench = CheckBench(cluster, seed=seed)

    async def main(service: Service) -> None:
        tickets = [service.frontend.submit(bench.request(n, [*PROMPT[: 4 * n], n], OUTPUT)) for n in range(1, 6)]
        await aio.sleep_ns(after_ms * MS)
        service.cluster.died(victim)
        service.cluster.died(victim)  # who is gone dies no second time
        for ticket in tickets:
            row = await ticket.task
            assert row.state is RequestState.COMPLETED, row.reason
            assert row.attempts <= 2
            assert row.output == expected(row.request, OUTPUT)
        await service.cluster.quiesce()
        service.cluster.check_idle()  # what the dead held on other nodes has run out, too

    bench.run(main)
    assert [event[0] for event in bench.rows.events if event[1] == "death"] == [after_ms * MS]
    retries = [event[0] for event in bench.rows.events if event[1] == "retry"]
    late = [time_ns for time_ns in retries if time_ns > (after_ms + LONGEST_STEP_MS) * MS]
    assert not late, "told at once, or as soon as the other side's step that uses its pages is over"


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        (Sampling(logprobs=9), r"sampling\.logprobs=9, at most 8"),
        (Sampling(stop_tokens=tuple(range(9)), min_tokens=1), r"9 stop tokens beside sampling\.min_tokens, at most 8"),
    ],
)
def test_what_no_sampler_gives_is_refused_in_words_and_ends_one_request(sampling: Sampling, problem: str) -> None:
    bench = CheckBench("1p1d")

    async def main(service: Service) -> None:
        asked = service.frontend.submit(bench.request(1, PROMPT, OUTPUT, sampling=sampling))
        other = service.frontend.submit(bench.request(2, PROMPT, OUTPUT))
        row = await asked.task
        assert row.state is RequestState.FAILED
        assert re.search(problem, row.reason)
        assert row.attempts == 0
        assert (await other.task).state is RequestState.COMPLETED

    bench.run(main)
