"""Several outputs of one prompt: they share its pages, each goes its own way, and all of them end together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from engine_fixtures import MS, CheckBench, Rows, expected, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax import aio
from mcjax.backends.check.world import Sizes
from mcjax.engine.cluster_spec import InstanceSpec
from mcjax.engine.service import Service
from mcjax.types import Request, RequestRow, RequestState, Sampling, Script, Tokens
from mcjax.workload.base import Session, Turn

OUTPUT = 11


def check(row: RequestRow, length: int = OUTPUT) -> None:
    """Every output is what it is without the others."""
    assert row.state is RequestState.COMPLETED, row.reason
    outputs = [row.output, *[branch.output for branch in row.branches]]
    assert len(outputs) == row.request.sampling.n
    for index, output in enumerate(outputs):
        assert output == expected(row.request, length, index), index
    assert row.output_tokens == length * len(outputs)
    assert [branch.finish_reason for branch in row.branches] == [row.finish_reason] * len(row.branches)


@pytest.mark.parametrize("cluster", ["1p1d", "1m"])
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8, 9, 22])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_output_is_its_own(cluster: str, prompt: int, temperature: float) -> None:
    """Whether the prompt ends with a full page or not; greedy outputs are all the same, others differ."""
    bench = CheckBench(cluster)
    sampling = Sampling(n=3, temperature=temperature, seed=5, logprobs=1)

    async def main(service: Service) -> None:
        beside = service.frontend.submit(bench.request(2, range(50, 59), OUTPUT))
        row = await service.frontend.submit(bench.request(1, range(prompt), OUTPUT, sampling=sampling)).task
        check(row)
        outputs = {tuple(row.output or ()), *[tuple(branch.output or ()) for branch in row.branches]}
        assert len(outputs) == (1 if temperature == 0 else 3)
        for branch in row.branches:
            assert branch.logprobs is not None
            assert len(branch.logprobs.chosen) == OUTPUT
        assert (await beside.task).output == expected(beside.task.result().request, OUTPUT)
        assert row.output is not None
        again = await service.frontend.submit(bench.request(3, [*range(prompt), *row.output, 7], 3)).task
        assert again.output == expected(again.request, 3), "what output 0 left behind is worth reading"

    bench.run(main)


@pytest.mark.parametrize("cluster", ["1p1d", "1m"])
def test_outputs_share_the_prompts_full_pages(cluster: str) -> None:
    """22 tokens are five full pages and a tail; 10 more need three pages of each output's own."""
    bench = CheckBench(cluster, sizes=Sizes(pages=5 + 4 * 3, chunk_tokens=6, max_batch=8))
    seen: list[list[list[int]]] = []

    async def main(service: Service) -> None:
        executor = bench.world.executors["m0" if cluster == "1m" else "d0"]
        run = executor.run

        async def spied(plan, max_steps, on_step=None):
            seen.append([list(item.pages) for item in plan.items if item.kind.value == "decode"])
            return await run(plan, max_steps, on_step)

        executor.run = spied  # pyright: ignore[reportAttributeAccessIssue]
        check(await service.frontend.submit(bench.request(1, range(22), 10, 10, sampling=Sampling(n=4))).task, 10)
        row = await service.frontend.submit(bench.request(2, range(22), 10, 10, sampling=Sampling(n=5))).task
        assert row.state is RequestState.FAILED
        assert "needs 20 pages for 5 outputs" in row.reason

    bench.run(main)
    together = max(seen, key=len)
    assert len(together) == 4
    assert len({tuple(pages[:5]) for pages in together}) == 1
    own = Counter(page for pages in together for page in pages[5:])
    assert max(own.values()) == 1
    assert not set(own) & set(together[0][:5])


@pytest.mark.parametrize(("headroom", "pages"), [(None, 5 + 3 * 4), (1, 5 + 3 * 1), (4, 5 + 3 * 2)])
def test_admission_counts_the_pages_of_all_outputs(headroom: int | None, pages: int) -> None:
    """22 tokens are five full pages and a tail of two; up to 12 more come, and so many are taken in advance."""
    bench = CheckBench("1m", headroom_tokens=headroom)

    async def main(service: Service) -> None:
        instance = service.cluster.instances["m0"]
        asked = bench.request(1, range(22), 12, 12, sampling=Sampling(n=3))
        job = service.frontend._job(asked, None, None)
        assert instance.decoder.pages_to_begin(job) == pages
        check(await service.frontend.submit(asked).task, 12)

    bench.run(main)


def test_an_output_that_ends_early_frees_its_own_pages_at_once() -> None:
    bench = CheckBench("1m")

    async def main(service: Service) -> None:
        asked = bench.request(1, range(22), 12, sampling=Sampling(n=3, temperature=1.0, seed=5))
        stop = expected(asked, 12, 1)[1]
        lengths = [
            (expected(asked, 12, at).index(stop) + 1 if stop in expected(asked, 12, at) else 12) for at in range(3)
        ]
        asked = replace(asked, sampling=replace(asked.sampling, stop_tokens=(stop,)))
        task = service.frontend.submit(asked).task
        free: list[int] = []
        while not task.done():
            await aio.sleep_ns(MS // 5)
            free.append(service.cluster.instances["m0"].pages.store.free_slots)
        row = task.result()
        outputs = [row.output or [], *[branch.output or [] for branch in row.branches]]
        assert [len(output) for output in outputs] == lengths
        assert lengths[1] == 2
        assert sorted(set(free)) != sorted({min(free), max(free)}), "in between, some had come back"

    bench.run(main)


def kinds(rows: Rows) -> Counter[str]:
    return Counter(event[1] for event in rows.events)


def serve(bench: CheckBench, requests: list[tuple[int, int, int]], gap_ms: float = 0.0) -> None:
    """Send `(prompt tokens, output tokens, n)` requests, and check everything that comes back."""

    async def main(service: Service) -> None:
        tickets = []
        for number, (prompt, output, count) in enumerate(requests):
            sampling = Sampling(n=count, temperature=1.0, seed=number)
            asked = bench.request(number, range(100 * number, 100 * number + prompt), output, 30, sampling=sampling)
            tickets.append((service.frontend.submit(asked), output))
            await aio.sleep_ns(round(gap_ms * MS))
        for ticket, output in tickets:
            check(await ticket.task, output)
        for row in bench.rows.requests:
            assert row.local_tokens + row.remote_tokens == 0, "prompts with nothing in common hit nothing"

    bench.run(main)


@pytest.mark.parametrize("cluster", ["1p1d", "1m"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_outputs_that_make_room_come_back_as_they_were(cluster: str, preemption: str) -> None:
    bench = CheckBench(
        cluster,
        sizes=Sizes(pages=32, pool_blocks=64, max_batch=8, chunk_tokens=6),
        headroom_tokens=1,
        preemption=preemption,  # pyright: ignore[reportArgumentType]
        attempts=1,
    )
    serve(bench, [(18, 28, 3), (17, 30, 2), (9, 26, 1)])
    seen = kinds(bench.rows)
    assert seen["preempt"] > 0
    assert seen["retry"] == 0
    assert (seen["recompute"] > 0) or preemption == "swap"


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["1p1d", "1m", "2p1d"]),
    st.integers(46, 60),
    st.integers(1, 6),
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 30), st.integers(1, 4)), min_size=2, max_size=5),
    st.sampled_from([0.0, 1.0, 6.0]),
    st.sampled_from(["swap", "recompute"]),
    st.integers(20, 60),
)
def test_any_pressure(
    cluster: str,
    pages: int,
    batch: int,
    headroom: int,
    requests: list[tuple[int, int, int]],
    gap_ms: float,
    preemption: str,
    pool_blocks: int,
) -> None:
    """Whoever makes room for whom, nobody waits for ever, and every output is right."""
    sizes = Sizes(pages=pages, pool_blocks=pool_blocks, max_batch=batch, chunk_tokens=7)
    bench = CheckBench(cluster, sizes=sizes, headroom_tokens=headroom, attempts=2)
    bench.preemption = preemption  # pyright: ignore[reportAttributeAccessIssue]
    serve(bench, requests, gap_ms)


@pytest.mark.parametrize("cluster", ["1p1d", "1m"])
@settings(max_examples=15)
@given(after_ms=st.integers(1, 70), seed=st.integers(0, 3), how=st.sampled_from(["cancel", "kill"]))
def test_a_cancel_ends_all_and_a_loss_takes_none_back(cluster: str, after_ms: int, seed: int, how: str) -> None:
    bench = CheckBench(cluster, seed=seed, headroom_tokens=2)

    async def main(service: Service) -> None:
        asked = bench.request(1, range(22), OUTPUT, sampling=Sampling(n=3, temperature=1.0, seed=5))
        ticket = service.frontend.submit(asked)
        victim = "m0" if cluster == "1m" else "d0"
        spec = InstanceSpec(f"{victim}b", service.cluster.instances[victim].role)
        await aio.sleep_ns(after_ms * MS)
        if how == "cancel":
            ticket.cancel()
        else:
            service.cluster.kill(victim)
            aio.clock().call_at_ns(aio.now_ns() + MS, service.cluster.join, spec)
        row = await ticket.task
        if how == "cancel" and row.state is RequestState.CANCELLED:
            outputs = [row.output, *[branch.output for branch in row.branches]]
            for index, output in enumerate(outputs):
                assert output == expected(asked, OUTPUT, index)[: len(output or ())]
        else:
            check(row)

    bench.run(main)


class Given:
    """Some turns, each a session."""

    name = "given"
    block_tokens: int | None = None

    def __init__(self, turns: list[Turn]):
        self._turns = turns

    def inputs(self) -> dict[str, str]:
        return {}

    def sessions(self) -> Iterator[Session]:
        for turn in self._turns:
            yield _Once(turn)


class _Once:
    def __init__(self, turn: Turn):
        self.start_ns = turn.request.arrival_ns
        self._turn: Turn | None = turn

    def next_turn(self, answer: Tokens | None) -> Turn | None:
        turn, self._turn = self._turn, None
        return turn


def test_the_simulated_world_counts_all_outputs() -> None:
    turns = [
        Turn(Request(at, at * MS, 300, 32, trace_ids=(9 * at, 9 * at + 1), sampling=Sampling(n=3)), Script(4 + at))
        for at in range(5)
    ]
    rows = simulate(Given(turns), "1p1d")
    assert len(rows.requests) == 5
    for row in rows.requests:
        assert row.state is RequestState.COMPLETED
        assert row.output_tokens == 3 * sum(map(len, row.token_ends_ns))
        assert np.concatenate(row.token_ends_ns)[-1] <= row.finish_ns
    tails = [event for event in rows.events if event[1] == "transfer" and "hbm>hbm" in str(event)]
    assert len(tails) == 5
