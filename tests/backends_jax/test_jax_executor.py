from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from mcjax.backends.progress import decode_progress
from mcjax.engine.base import Kind, StepPlan
from mcjax.errors import ExecutorFailed, InstanceDown
from mcjax.types import NullRecorder, Sampling

PAGES = list(range(12))


class Outcomes(NullRecorder):
    def __init__(self):
        self.rows = []

    def outcome(self, time_ns, mechanism, call, payload):
        self.rows.append((time_ns, mechanism, call, payload))


def test_progress_outcome_and_busy_time_agree(lab):
    recorder = Outcomes()

    async def main():
        executor = lab.executor("d7", recorder=recorder)
        token = await lab.prefill(executor, lab.prompt(1, 40), PAGES)
        progress = await executor.run(StepPlan([lab.item(Kind.DECODE, [token], 40, PAGES)]), 5)
        return progress, executor.busy_ns()

    progress, busy_ns = lab.run(main)
    assert progress.steps == 5
    assert progress.ends_ns.dtype == np.int64
    assert (np.diff(progress.ends_ns) > 0).all()
    assert progress.ends_ns[0] > progress.start_ns >= 0
    assert progress.finished == ()
    assert [(row[1], row[2]) for row in recorder.rows] == [("d7", 0), ("d7", 1), ("d7", 2)]
    time_ns, _, _, payload = recorder.rows[-1]
    assert time_ns >= progress.ends_ns[-1]
    logged = decode_progress(payload)
    assert (logged.steps, logged.start_ns, logged.finished) == (5, progress.start_ns, ())
    np.testing.assert_array_equal(logged.ends_ns, progress.ends_ns)
    np.testing.assert_array_equal(logged.tokens[0], progress.tokens[0])
    spans = [decode_progress(row[3]) for row in recorder.rows]
    assert busy_ns == sum(int(span.ends_ns[-1]) - span.start_ns for span in spans)


def test_a_prefill_item_without_samples_returns_no_token(lab):
    async def main():
        executor = lab.executor()
        item = lab.item(Kind.PREFILL, lab.prompt(2, 10), 0, PAGES, samples=False)
        return await executor.run(StepPlan([item]), 9)

    progress = lab.run(main)
    assert progress.steps == 1
    assert progress.tokens[0].tolist() == []


def test_a_stop_token_ends_the_run_and_names_the_item(lab):
    async def main():
        executor = lab.executor()
        token = await lab.prefill(executor, lab.prompt(3, 33), PAGES)
        free = await lab.decode(executor, token, 33, PAGES, 12)
        stop = Sampling(stop_tokens=(free[6],))
        first = free.index(free[6])
        other = lab.item(Kind.DECODE, [1], 0, [20, 21, 22])
        items = [other, lab.item(Kind.DECODE, [token], 33, PAGES, sampling=stop)]
        return first, await executor.run(StepPlan(items), 12)

    first, progress = lab.run(main)
    assert progress.steps == first + 1 < 12
    assert progress.finished == (1,)
    assert [len(tokens) for tokens in progress.tokens] == [first + 1, first + 1]


def test_interrupt_stops_at_a_step_boundary_and_idle_ones_are_forgotten(lab):
    async def main():
        executor = lab.executor()
        executor.interrupt()
        token = await lab.prefill(executor, lab.prompt(4, 20), PAGES)
        whole = await lab.decode(executor, token, 20, PAGES, 60)
        # The first step cannot begin before this host job is done, and by then the interrupt is there.
        hold = threading.Event()
        executor.submit_host(lambda: hold.wait(10))
        run = asyncio.ensure_future(lab.decode(executor, token, 20, PAGES, 60))
        await asyncio.sleep(0)
        executor.interrupt()
        hold.set()
        return whole, await run

    whole, cut = lab.run(main)
    assert len(whole) == 60
    assert cut == whole[:1]


def test_a_cancelled_run_lets_go_only_when_the_step_is_over(lab):
    async def main():
        executor = lab.executor()
        hold, order = threading.Event(), []
        executor.submit_host(lambda: hold.wait(10))
        run = asyncio.ensure_future(lab.decode(executor, 1, 0, PAGES, 50))
        await asyncio.sleep(0)
        run.cancel()
        run.add_done_callback(lambda _: order.append("gone"))
        await asyncio.sleep(0.05)
        order.append("held")
        hold.set()
        with pytest.raises(asyncio.CancelledError):
            await run
        return order, executor.busy_ns(), await lab.decode(executor, 1, 0, PAGES, 2)

    order, busy_ns, after = lab.run(main)
    assert order == ["held", "gone"]
    assert busy_ns > 0
    assert len(after) == 2


def test_host_jobs_run_between_steps_of_a_running_plan(lab):
    async def main():
        executor = lab.executor()
        token = await lab.prefill(executor, lab.prompt(5, 20), PAGES)
        seen, counter = [], [0]
        step = executor.step

        def counted(*args):
            counter[0] += 1
            if counter[0] == 3:
                executor.submit_host(lambda: seen.append(counter[0]))
            return step(*args)

        executor.step = counted
        await lab.decode(executor, token, 20, PAGES, 10)
        return seen

    assert lab.run(main) == [3]


BAD_ITEMS = {  # kind, tokens, start, pages; what the message says
    "no tokens": (Kind.DECODE, [], 0, PAGES, "q_len=0"),
    "two tokens in a decode item": (Kind.DECODE, [1, 2], 0, PAGES, "q_len=2"),
    "a chunk too wide": (Kind.PREFILL, [1] * 33, 0, PAGES, "1 to 32"),
    "verify": (Kind.VERIFY, [1], 0, PAGES, "verify"),
    "beyond the pages": (Kind.DECODE, [1], 92, PAGES, "do not fit 12 pages"),
    "beyond the context": (Kind.DECODE, [1], 196, list(range(30)), "max_context_tokens=200"),
    "the scratch page": (Kind.DECODE, [1], 0, [40], "below 40"),
    "a page below zero": (Kind.DECODE, [1], 0, [-1], "below 40"),
}


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_plans_that_do_not_fit_are_refused_by_request(lab, name):
    kind, tokens, start, pages, problem = BAD_ITEMS[name]

    async def main():
        executor = lab.executor()
        with pytest.raises(ValueError, match=rf"request 7: .*{problem}"):
            await executor.run(StepPlan([lab.item(kind, tokens, start, pages)]), 5)
        return await lab.decode(executor, 1, 0, PAGES, 1)

    assert len(lab.run(main)) == 1


def test_a_batch_too_large_an_empty_plan_and_two_plans_at_once_are_refused(lab):
    async def main():
        executor = lab.executor()
        items = [lab.item(Kind.DECODE, [1], 0, [page]) for page in range(5)]
        with pytest.raises(ValueError, match="max_batch=4"):
            await executor.run(StepPlan(items), 1)
        with pytest.raises(ValueError, match="0 items"):
            await executor.run(StepPlan([]), 1)
        run = asyncio.ensure_future(lab.decode(executor, 1, 0, PAGES, 3))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="one plan at a time"):
            await lab.decode(executor, 1, 0, PAGES, 3)
        return await run

    assert len(lab.run(main)) == 3


def test_what_the_thread_raises_arrives_and_is_recorded(lab):
    recorder = Outcomes()

    async def main():
        executor = lab.executor(recorder=recorder)

        def broken():
            raise OSError("device fell off")

        before = await lab.decode(executor, 1, 0, PAGES, 3)
        executor.submit_host(broken)
        with pytest.raises(ExecutorFailed, match=r"executor p0: OSError: device fell off$") as caught:
            await lab.decode(executor, before[0], 1, PAGES, 2)
        assert not caught.value.lost_pages
        return before, await lab.decode(executor, before[0], 1, PAGES, 2)

    before, after = lab.run(main)
    assert after == before[1:], "told once; the pages are as they were"
    with pytest.raises(ExecutorFailed, match="OSError: device fell off"):
        decode_progress(recorder.rows[1][3])


def test_close_ends_the_thread_in_mid_run_and_refuses_what_follows(lab):
    async def main():
        before = threading.active_count()
        executor = lab.executor()
        run = asyncio.ensure_future(lab.decode(executor, 1, 0, PAGES, 90))
        await asyncio.sleep(0)
        await executor.close()
        tokens = await run
        with pytest.raises(InstanceDown):
            await lab.decode(executor, 1, 0, PAGES, 1)
        executor.poison([1])
        await executor.close()
        return threading.active_count() - before, tokens

    threads, tokens = lab.run(main)
    assert threads == 0
    assert 1 <= len(tokens) <= 90


def test_programs_are_compiled_once_a_device(lab):
    async def main():
        first, second = lab.executor("first"), lab.executor("second")
        await first.warm_up()
        count = first.compile_count
        await second.warm_up()
        await lab.prefill(second, lab.prompt(6, 70), PAGES)
        await lab.decode(second, 1, 0, PAGES, 2)
        return count, second.compile_count

    assert lab.run(main) == (10, 10), "two shapes of the model, two samplers of each, and four that make and move pages"


def test_a_plan_begun_without_a_loop_is_answered_on_the_executors_thread(lab):
    recorder = Outcomes()
    heard, steps, over = [], [], threading.Event()

    def answered(answer, losses):
        heard.append((answer, losses, threading.current_thread().name))
        over.set()

    def begin(executor, token, most):
        over.clear()
        plan = StepPlan([lab.item(Kind.DECODE, [token], 33, PAGES)])
        ticks = iter(range(100, 100_000, 7))
        executor.begin(plan, most, answered, lambda: next(ticks), lambda *told: steps.append(told))

    async def main():
        executor = lab.executor("d9", recorder=recorder)
        token = await lab.prefill(executor, lab.prompt(3, 33), PAGES)
        whole = await lab.decode(executor, token, 33, PAGES, 6)
        logged = len(recorder.rows)
        begin(executor, token, 6)
        with pytest.raises(ValueError, match="one plan at a time"):
            begin(executor, token, 6)
        assert over.wait(60)
        progress, losses, thread = heard.pop()
        assert progress.tokens[0].tolist() == whole
        assert (losses, thread) == (0, "mcjax-d9")
        assert (progress.start_ns, progress.ends_ns.tolist()) == (100, [107, 114, 121, 128, 135, 142])
        assert steps == [(k, [whole[k]], 107 + 7 * k) for k in range(6)]
        assert len(recorder.rows) == logged, "whoever asked keeps the log"
        with pytest.raises(ValueError, match="needs items"):
            executor.begin(StepPlan([]), 1, answered, lambda: 0)
        await executor.close()
        with pytest.raises(InstanceDown):
            begin(executor, token, 1)

    lab.run(main)
