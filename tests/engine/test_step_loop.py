"""The step loop over an executor of fixed step time: chunks, batches, horizons, joining, leaving, dying."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from collections.abc import Sequence as PySequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from engine_fixtures import MS

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop
from mcjax.engine.base import Capacity, Kind, Progress, StepItem, StepPlan
from mcjax.engine.loop import StepLoop
from mcjax.engine.sequence import End, Sequence
from mcjax.errors import BrokenOutput, ConfigError, ExecutorFailed, InstanceDown, McjaxError, TransferError
from mcjax.sched.base import Batch, Batching
from mcjax.sched.batching.chunked import Chunked
from mcjax.sched.batching.decode_first import DecodeFirst
from mcjax.sched.batching.prefill_first import PrefillFirst
from mcjax.sched.tenancy.fifo import FIFO
from mcjax.sched.tenancy.priority import Priority
from mcjax.types import NullRecorder, Request, Sampling

STEP = 10 * MS


@dataclass
class Clockwork:
    """Every step takes 10 ms; stops at a boundary when interrupted. Keeps what it was asked for."""

    name: str = "clockwork"
    max_batch: int = 4
    plans: list[tuple[int, list[tuple[int, str, int, int]], int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    problem: McjaxError | None = None
    breaks: dict[int, str] = field(default_factory=dict)
    """Requests that come to nothing once they have produced two tokens in a plan, or with their first chunk."""
    ends_after: dict[int, int] = field(default_factory=dict)
    """Output tokens by request, where it ends before its limit."""
    stop: bool = False

    def capacity(self) -> Capacity:
        return Capacity(64, 4, 1, self.max_batch, 8, 100)

    def step_ends_ns(self) -> np.ndarray:
        return np.zeros(0, np.int64)

    def busy_ns(self) -> int:
        return 0

    def interrupt(self) -> None:
        self.stop = True

    async def run(self, plan: StepPlan, max_steps: int, on_step: object = None) -> Progress:
        items = [(item.request_id, item.kind.value, item.start, item.q_len) for item in plan.items]
        self.plans.append((aio.now_ns(), items, max_steps))
        start_ns, ends_ns, self.stop = aio.now_ns(), list[int](), False
        finished: list[int] = []
        failed: dict[int, str] = {}
        while len(ends_ns) < max_steps and not (finished or failed) and not (ends_ns and self.stop):
            await aio.sleep_ns(STEP)
            if self.problem is not None:
                problem, self.problem = self.problem, None
                raise problem
            ends_ns.append(aio.now_ns())
            for index, item in enumerate(plan.items):
                limit = self.ends_after.get(item.request_id, 1 << 30)
                if item.samples and item.generated + len(ends_ns) >= limit:
                    finished.append(index)
                if item.request_id in self.breaks and (len(ends_ns) == 3 or item.kind is Kind.PREFILL):
                    failed[index] = self.breaks[item.request_id]
        self.steps.append(len(ends_ns))
        tokens = [np.arange(len(ends_ns), dtype=np.int32) if item.samples else None for item in plan.items]
        return Progress(len(ends_ns), start_ns, np.array(ends_ns, np.int64), list(tokens), tuple(finished), failed)


class Bench:
    def __init__(
        self, batching: Batching | None = None, max_steps: int | None = None, tenancy: Any = None, max_batch: int = 4
    ):
        self.executor = Clockwork(max_batch=max_batch)
        self.published: list[int] = []
        self.loop = StepLoop(
            "m0",
            self.executor,
            batching or PrefillFirst(),
            tenancy or FIFO(),
            NullRecorder(),
            lambda: self.published.append(aio.now_ns()),
            lambda owner, count: [0] * count,
            max_steps,
        )
        self.told: list[tuple[Any, ...]] = []

    def prompt(self, request_id: int, tokens: int, start: int = 0, priority: int = 0, order: int = 0) -> Sequence:
        request = Request(request_id, 0, tokens, 8, tokens=np.arange(tokens, dtype=np.int32), priority=priority)
        item = StepItem(request_id, Kind.PREFILL, start, 0, [0], Sampling())
        made = Sequence(request, item, asyncio.get_running_loop().create_future(), end=tokens, order=order)
        made.on_chunk = lambda begin, end, _: self.told.append((request_id, begin, end, aio.now_ns()))
        return made

    def decode(self, request_id: int, context: int, limit: int) -> Sequence:
        request = Request(request_id, 0, context, limit)
        item = StepItem(request_id, Kind.DECODE, context, 1, [0] * 100, Sampling(), generated=1)
        made = Sequence(request, item, asyncio.get_running_loop().create_future(), limit=limit)

        def on_tokens(first: int, tokens: Any, ends_ns: np.ndarray, logprobs: Any) -> bool:
            self.told.append((request_id, first, ends_ns.tolist()))
            return False

        made.on_tokens = on_tokens
        return made


def play(make: Callable[[], Bench], main: Callable[[Bench], Coroutine[Any, Any, None]]) -> Bench:
    kept: list[Bench] = []

    async def body() -> None:
        bench = make()
        kept.append(bench)
        async with aio.Scope("test") as scope:
            scope.spawn(bench.loop.run(), "loop")
            await scope.run(main(bench))

    VirtualLoop().run(body)
    return kept[0]


async def all_done(sequences: PySequence[Sequence]) -> list[End]:
    return [await sequence.done for sequence in sequences]


def test_a_prompt_is_computed_chunk_by_chunk_and_only_the_last_one_samples() -> None:
    async def main(bench: Bench) -> None:
        prompt = bench.prompt(1, 20, start=3)
        bench.loop.add_prefill(prompt)
        assert await prompt.done == End(0, 3 * STEP)

    bench = play(Bench, main)
    assert [items for _, items, _ in bench.executor.plans] == [
        [(1, "prefill", 3, 8)],
        [(1, "prefill", 11, 8)],
        [(1, "prefill", 19, 1)],
    ]
    assert bench.told == [(1, 3, 11, STEP), (1, 11, 19, 2 * STEP), (1, 19, 20, 3 * STEP)]
    assert list(dict.fromkeys(bench.published)) == [0, STEP, 2 * STEP, 3 * STEP], "the load is reported as it changes"
    assert not bench.loop.prefills


def test_prompts_go_one_after_the_other_in_order_of_arrival_or_of_priority() -> None:
    async def main(bench: Bench) -> None:
        prompts = [bench.prompt(1, 16), bench.prompt(2, 16, priority=1), bench.prompt(3, 8)]
        for prompt in prompts:
            bench.loop.add_prefill(prompt)
        await all_done(prompts)

    def order(tenancy: Any) -> list[int]:
        return [items[0][0] for _, items, _ in play(lambda: Bench(tenancy=tenancy), main).executor.plans]

    assert order(FIFO()) == [1, 1, 2, 2, 3]
    assert order(Priority()) == [2, 2, 1, 1, 3]


def test_a_macro_step_reaches_to_the_first_limit() -> None:
    async def main(bench: Bench) -> None:
        both = [bench.decode(1, 10, limit=4), bench.decode(2, 20, limit=6)]
        for sequence in both:
            bench.loop.add_decode(sequence)
        first, second = await all_done(both)
        assert (first.end_ns, second.end_ns) == (3 * STEP, 5 * STEP)

    bench = play(Bench, main)
    assert bench.executor.steps == [3, 2]
    assert bench.told == [
        (1, 1, [STEP, 2 * STEP, 3 * STEP]),
        (2, 1, [STEP, 2 * STEP, 3 * STEP]),
        (2, 4, [4 * STEP, 5 * STEP]),
    ]
    assert bench.loop.context_tokens == 0


@pytest.mark.parametrize("max_steps", [1, 2, None])
def test_a_bound_on_macro_steps_changes_no_time(max_steps: int | None) -> None:
    async def main(bench: Bench) -> None:
        bench.executor.ends_after[2] = 5
        both = [bench.decode(1, 10, limit=7), bench.decode(2, 20, limit=9)]
        for sequence in both:
            bench.loop.add_decode(sequence)
        first, second = await all_done(both)
        assert (first.end_ns, second.end_ns) == (6 * STEP, 4 * STEP)
        assert first.finish_reason == "length"
        assert second.finish_reason == "stop"

    assert max(play(lambda: Bench(max_steps=max_steps), main).executor.steps) == (max_steps or 4)


def test_who_joins_ends_a_macro_step_at_its_next_boundary() -> None:
    async def main(bench: Bench) -> None:
        long, late = bench.decode(1, 10, limit=50), bench.decode(2, 5, limit=4)
        bench.loop.add_decode(long)
        await aio.sleep_ns(STEP + STEP // 2)
        bench.loop.add_decode(late)
        assert bench.loop.context_tokens == 15, "as of the last boundary that was told"
        await all_done([long, late])

    bench = play(Bench, main)
    assert bench.executor.steps[:2] == [2, 3]
    assert [time_ns for time_ns, _, _ in bench.executor.plans][1] == 2 * STEP
    assert bench.loop.context_tokens == 0


def test_a_prompt_stops_decodes_or_rides_with_them() -> None:
    async def main(bench: Bench) -> None:
        decode, prompt = bench.decode(1, 10, limit=8), bench.prompt(2, 16)
        bench.loop.add_decode(decode)
        await aio.sleep_ns(STEP // 2)
        bench.loop.add_prefill(prompt)
        await all_done([decode, prompt])

    alone, together = play(Bench, main), play(lambda: Bench(Chunked(5)), main)
    assert [[item[0] for item in items] for _, items, _ in alone.executor.plans] == [[1], [2], [2], [1]]
    assert [items for _, items, _ in together.executor.plans][1:5] == [
        [(2, "prefill", start, 4), (1, "decode", 11 + step, 1)] for step, start in enumerate((0, 4, 8, 12))
    ]
    assert all(steps == 1 for _, items, steps in together.executor.plans if len(items) == 2)


def test_a_step_is_filled_with_the_chunks_of_several_prompts_in_the_order_that_tenancy_wants() -> None:
    async def main(bench: Bench) -> None:
        decode = bench.decode(1, 10, limit=8)
        bench.loop.add_decode(decode)
        await aio.sleep_ns(STEP // 2)
        prompts = [bench.prompt(2, 3), bench.prompt(3, 20, priority=1), bench.prompt(4, 4, priority=2)]
        for prompt in prompts:
            bench.loop.add_prefill(prompt)
        await all_done([decode, *prompts])

    plans = [items for _, items, _ in play(lambda: Bench(Chunked(11), tenancy=Priority()), main).executor.plans]
    shares = [[(item[0], item[3]) for item in items] for items in plans]
    assert shares[1:5] == [[(4, 4), (3, 6), (1, 1)], [(3, 8), (2, 2), (1, 1)], [(3, 6), (2, 1), (1, 1)], [(1, 1)]]


def test_decode_first_lets_a_prompt_in_between() -> None:
    async def main(bench: Bench) -> None:
        decode = bench.decode(1, 10, limit=9)
        bench.loop.add_decode(decode)
        await aio.sleep_ns(STEP // 2)
        prompt = bench.prompt(2, 16)
        bench.loop.add_prefill(prompt)
        await all_done([decode, prompt])

    plans = [items for _, items, _ in play(lambda: Bench(DecodeFirst(3)), main).executor.plans]
    assert [items[0][0] for items in plans] == [1, 1, 1, 1, 2, 1, 1, 1, 2, 1]


def test_more_sequences_than_the_batch_holds_wait_their_turn() -> None:
    async def main(bench: Bench) -> None:
        sequences = [bench.decode(number, 1, limit=3) for number in range(5)]
        for sequence in sequences:
            bench.loop.add_decode(sequence)
        assert (len(bench.loop.decodes), len(bench.loop.waiting_decodes)) == (2, 3)
        assert bench.loop.context_tokens == 5, "who waits is part of the load"
        ends = await all_done(sequences)
        assert [end.end_ns // STEP for end in ends] == [2, 2, 4, 4, 6]

    play(lambda: Bench(max_batch=2), main)


def test_who_leaves_waits_for_the_step_that_uses_its_pages() -> None:
    async def main(bench: Bench) -> None:
        goes, stays = bench.decode(1, 10, limit=50), bench.decode(2, 20, limit=6)
        bench.loop.add_decode(goes)
        bench.loop.add_decode(stays)
        await aio.sleep_ns(STEP + 1)
        await bench.loop.leave(goes)
        assert aio.now_ns() == 2 * STEP, "the boundary after the one that was running"
        assert not goes.done.done()
        assert (await stays.done).end_ns == 5 * STEP
        assert bench.loop.context_tokens == 0

    bench = play(Bench, main)
    assert [entry for entry in bench.told if entry[0] == 1] == [(1, 1, [STEP])], "of the step that had ended, no more"


def test_who_does_not_run_leaves_at_once() -> None:
    async def main(bench: Bench) -> None:
        running, waiting = bench.prompt(1, 8), bench.prompt(2, 8)
        queued = bench.decode(3, 10, limit=4)
        bench.loop.add_prefill(running)
        bench.loop.add_prefill(waiting)
        bench.loop.add_decode(queued)
        await aio.sleep_ns(1)
        await bench.loop.leave(waiting)
        await bench.loop.leave(queued)
        assert aio.now_ns() == 1
        await running.done
        assert bench.loop.context_tokens == 0

    assert len(play(Bench, main).executor.plans) == 1


@pytest.mark.parametrize("cancels", [1, 2, 3])
def test_a_leaver_that_is_cancelled_still_waits_for_the_step(cancels: int) -> None:
    """Its pages are given back right after: a step that still writes them would write into somebody else's."""

    async def main(bench: Bench) -> None:
        prompt = bench.prompt(1, 8)
        bench.loop.add_prefill(prompt)
        await aio.sleep_ns(1)
        task = aio.spawn(bench.loop.leave(prompt), "leave")
        for _ in range(cancels):
            await aio.sleep_ns(1)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert aio.now_ns() == STEP

    play(Bench, main)


def test_the_dead_take_nobody_on_and_keep_nobody() -> None:
    async def main(bench: Bench) -> None:
        running = bench.decode(1, 10, limit=50)
        bench.loop.add_decode(running)
        await aio.sleep_ns(STEP + 1)
        leaving = aio.spawn(bench.loop.leave(running), "leave")
        await aio.sleep_ns(1)
        bench.loop.kill(InstanceDown("m0"))
        await leaving
        assert aio.now_ns() == STEP + 2, "nobody waits for a step that never ends"
        for add in (bench.loop.add_prefill, bench.loop.add_decode):
            with pytest.raises(InstanceDown):
                add(bench.decode(2, 10, limit=4))
        await aio.sleep_ns(20 * STEP)

    bench = play(Bench, main)
    assert len(bench.executor.plans) == 1
    assert bench.told == [], "a dead instance tells nobody anything"


def test_a_failing_step_is_told_to_those_in_it_and_the_loop_goes_on() -> None:
    async def main(bench: Bench) -> None:
        bench.executor.problem = TransferError("device lost")
        unlucky, waiting = bench.prompt(1, 8), bench.prompt(2, 8)
        bench.loop.add_prefill(unlucky)
        bench.loop.add_prefill(waiting)
        with pytest.raises(TransferError):
            await unlucky.done
        await waiting.done
        assert bench.loop.context_tokens == 0

    play(Bench, main)


def test_a_sequence_without_a_finite_logit_ends_alone() -> None:
    """What it had before is told, what the broken step gave is not; the others do not notice."""

    async def main(bench: Bench) -> None:
        bench.executor.breaks = {1: "its logits are not numbers", 3: "its logits are not numbers"}
        bad, good, prompt = bench.decode(1, 10, limit=20), bench.decode(2, 20, limit=9), bench.prompt(3, 16)
        for sequence in (bad, good):
            bench.loop.add_decode(sequence)
        with pytest.raises(BrokenOutput, match="request 1: its output broke off: its logits are not numbers"):
            await bad.done
        assert aio.now_ns() == 3 * STEP
        assert bench.loop.context_tokens == 23
        bench.loop.add_prefill(prompt)
        with pytest.raises(BrokenOutput, match="request 3"):
            await prompt.done
        assert not bench.loop.prefills
        await good.done
        assert bench.loop.context_tokens == 0

    bench = play(Bench, main)
    assert [entry[:2] for entry in bench.told if entry[0] != 2] == [(1, 1)]
    assert next(entry[2] for entry in bench.told if entry[0] == 1) == [STEP, 2 * STEP]
    assert sum(len(entry[2]) for entry in bench.told if entry[0] == 2) == 8


def test_an_executor_that_lost_its_pages_says_so_and_runs_nothing_more() -> None:
    async def main(bench: Bench) -> None:
        lost: list[int] = []
        bench.loop.on_lost = lambda: lost.append(aio.now_ns())
        bench.executor.problem = ExecutorFailed("device lost", lost_pages=True)  # pyright: ignore
        bench.loop.add_prefill(bench.prompt(1, 8))
        await aio.sleep_ns(5 * STEP)
        assert lost == [STEP]
        with pytest.raises(ExecutorFailed):
            bench.loop.add_prefill(bench.prompt(2, 8))

    assert len(play(Bench, main).executor.plans) == 1


def test_an_executor_that_breaks_ends_the_run_and_nobody_hangs() -> None:
    """Not one of our errors: the loop cannot go on. Who leaves because of it must not wait for the broken step."""

    async def main(bench: Bench) -> None:
        async def broken(plan: StepPlan, max_steps: int, on_step: object) -> Progress:
            await aio.sleep_ns(STEP)
            raise ZeroDivisionError("a bug")

        bench.executor.run = broken  # pyright: ignore[reportAttributeAccessIssue]
        prompt = bench.prompt(1, 8)
        bench.loop.add_prefill(prompt)
        try:
            await prompt.done
        finally:
            await bench.loop.leave(prompt)

    with pytest.raises(ZeroDivisionError):
        play(Bench, main)


def test_a_dead_executors_error_does_not_start_another_step() -> None:
    async def main(bench: Bench) -> None:
        bench.executor.problem = TransferError("device lost")
        first, second = bench.prompt(1, 8), bench.prompt(2, 8)
        bench.loop.add_prefill(first)
        bench.loop.add_prefill(second)
        await aio.sleep_ns(1)
        bench.loop.kill(InstanceDown("m0"))
        await aio.sleep_ns(5 * STEP)

    assert len(play(Bench, main).executor.plans) == 1


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        (Batch((), decode=False), "chose nothing while 1 prompts wait"),
        (Batch((), decode=True), "chose nothing while 1 prompts wait"),
        (Batch(((1, 4),), decode=False), r"chose prompts \[1\] of 1"),
        (Batch(((0, 2), (0, 2)), decode=False), r"chose prompts \[0, 0\] of 1"),
        (Batch(((0, 0),), decode=False), "chose a chunk of 0 tokens where 1 to 8 go"),
        (Batch(((0, 9),), decode=False), "chose a chunk of 9 tokens where 1 to 8 go"),
    ],
)
def test_a_batching_that_could_hang_or_overrun_is_named(batch: Batch, problem: str) -> None:
    class Wild:
        def choose(self, waiting_tokens: PySequence[int], decoding: int, chunk_tokens: int) -> Batch:
            return batch

    async def main(bench: Bench) -> None:
        prompt = bench.prompt(1, 30)
        bench.loop.add_prefill(prompt)
        await prompt.done

    with pytest.raises(ConfigError, match=rf"sched\.batching=Wild: {problem}"):
        play(lambda: Bench(Wild()), main)


def test_a_tenancy_that_chooses_nobody_is_named() -> None:
    class Wild(FIFO):
        def next(self, waiting: PySequence[Request]) -> int:
            return len(waiting)

    async def main(bench: Bench) -> None:
        for number in (1, 2):
            bench.loop.add_prefill(bench.prompt(number, 8))
        await aio.sleep_ns(STEP)

    with pytest.raises(ConfigError, match=r"sched\.tenancy=Wild"):
        play(lambda: Bench(tenancy=Wild()), main)


def test_a_prompt_that_was_not_ready_keeps_its_place() -> None:
    """It comes in at the next chunk of a prompt that was ready sooner."""

    async def main(bench: Bench) -> None:
        prompts = [bench.prompt(number, 16, order=number) for number in (2, 3, 4)]
        for prompt in prompts:
            bench.loop.add_prefill(prompt)
        await aio.sleep_ns(1)
        late = bench.prompt(1, 8, order=1)
        bench.loop.add_prefill(late)
        assert [sequence.order for sequence in bench.loop.prefills] == [1, 2, 3, 4]
        await prompts[-1].done

    bench = play(Bench, main)
    assert [entry[0] for entry in bench.told] == [2, 1, 2, 3, 3, 4, 4]
