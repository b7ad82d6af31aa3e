"""What raises on the device costs its own plan; what dies tells whoever waits."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mcjax.backends.jax.device_store import DevicePages
from mcjax.backends.jax.device_transport import Device
from mcjax.backends.jax.executor import JaxExecutor
from mcjax.backends.jax.programs import Geometry, Programs
from mcjax.backends.progress import ExecutorFailed, decode_progress
from mcjax.engine.base import Kind, StepPlan
from mcjax.errors import ConfigError, InstanceDown, StaleRegion
from mcjax.kvpool.stores.host import HostStore
from mcjax.transfer.base import Copy
from mcjax.types import NullRecorder

PAGES = list(range(12))


class Outcomes(NullRecorder):
    def __init__(self):
        self.payloads = []

    def outcome(self, time_ns, mechanism, call, payload):
        self.payloads.append(payload)


def out_of_memory(*_):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory while trying to allocate\n  frame 1\n  frame 2")


class Breaks:
    """Stands before an executor's programs; the `at`-th call of its models (or samplers) raises, before or after it
    ran."""

    def __init__(self, executor: JaxExecutor, program: str, at: int, raises: Callable[..., object], after: bool):
        self._real = executor.programs()
        self._program, self._at, self._raises, self._after = program, at, raises, after
        self._calls = 0
        setattr(executor, "programs", lambda: self)  # noqa: B010 - it stands in for a class that it is not

    def __getattr__(self, name: str):
        found = getattr(self._real, name)
        return found if name != self._program else lambda *shape: partial(self._call, found(*shape))

    def _call(self, program, *arguments):
        self._calls += 1
        if self._calls == self._at and not self._after:
            self._raises()
        answer = program(*arguments)
        if self._calls == self._at:
            self._raises()
        return answer


@pytest.mark.parametrize(
    ("program", "after", "lost"),
    [("model", False, False), ("model", True, True), ("sampler", False, False), ("sampler", True, False)],
    ids=["before the pages go", "after they have gone", "between model and sampler", "after the sampler"],
)
def test_a_failed_step_is_a_typed_error_and_the_executor_goes_on(lab, program, after, lost):
    recorder = Outcomes()

    async def main():
        executor = lab.executor("d3", recorder=recorder)
        token = await lab.prefill(executor, lab.prompt(1, 40), PAGES)
        want = await lab.decode(executor, token, 40, PAGES, 6)
        Breaks(executor, program, 3, out_of_memory, after)
        with pytest.raises(ExecutorFailed) as caught:
            await lab.decode(executor, token, 40, PAGES, 6)
        if lost:
            token = await lab.prefill(executor, lab.prompt(1, 40), PAGES)
        return caught.value, want, await lab.decode(executor, token, 40, PAGES, 6)

    failure, want, after_all = lab.run(main)
    assert after_all == want
    assert failure.lost_pages == lost
    message = "executor d3: JaxRuntimeError: RESOURCE_EXHAUSTED: out of memory while trying to allocate"
    assert str(failure) == message + ("; its pages are lost" if lost else "")
    [logged] = [payload for payload in recorder.payloads if "error" in payload]
    with pytest.raises(ExecutorFailed) as replayed:
        decode_progress(logged)
    assert (str(replayed.value), replayed.value.lost_pages) == (str(failure), lost)


@pytest.mark.parametrize("kind", [MemoryError, ValueError, KeyError])
def test_any_exception_is_typed(lab, kind):
    def raises():
        raise kind

    async def main():
        executor = lab.executor()
        Breaks(executor, "model", 1, raises, False)
        with pytest.raises(ExecutorFailed, match=rf"^executor p0: {kind.__name__}$"):
            await lab.decode(executor, 1, 0, PAGES, 3)
        return await lab.decode(executor, 1, 0, PAGES, 3)

    assert len(lab.run(main)) == 3


def test_lost_pages_are_new_and_no_region_of_before_is_read_again(lab):
    async def main():
        transport = Device()
        executor = lab.executor()
        pages = DevicePages("n0", executor)
        host = HostStore("n0", 4, lab.programs.page_bytes)
        transport.register(pages)
        transport.register(host)
        slots, kept = pages.reserve(12), host.reserve(2)
        token = await lab.prefill(executor, lab.prompt(2, 40), slots)
        before = pages.regions(slots[:2])
        Breaks(executor, "model", 2, out_of_memory, True)
        hold = threading.Event()
        executor.submit_host(lambda: hold.wait(10))
        run = asyncio.ensure_future(lab.decode(executor, token, 40, slots, 6))
        await asyncio.sleep(0)
        hold.set()
        while executor.losses == 0:
            await asyncio.sleep(0)
        # Nobody on this side knows yet: who asks for a region now still believes in the old pages.
        between = pages.regions(slots[:2]) if executor.losses_told == 0 else before
        late = [transport.submit([Copy(region, host.regions(kept))]).future for region in (before, between)]
        with pytest.raises(ExecutorFailed, match="pages are lost"):
            await run
        results = [(await future)[0] for future in late]
        kv = await lab.kv(executor, slots, 40)
        await lab.prefill(executor, lab.prompt(2, 40), slots)
        [good] = await transport.submit([Copy(pages.regions(slots[:2]), host.regions(kept))]).future
        return results, kv, good, host.buffer()[kept]

    results, kv, good, held = lab.run(main)
    assert [type(result.error) for result in results] == [StaleRegion, StaleRegion]
    assert np.isnan(kv.view(np.float32)).all()
    assert good.error is None
    assert np.isfinite(held.view(np.float32)).all()


def test_a_copy_that_costs_the_pages_is_told_by_its_result_and_by_the_plan_under_way(lab):
    async def main():
        transport = Device()
        executor = lab.executor()
        pages = DevicePages("n0", executor)
        host = HostStore("n0", 4, lab.programs.page_bytes)
        transport.register(pages)
        transport.register(host)
        slots, kept = pages.reserve(12), host.reserve(1)
        token = await lab.prefill(executor, lab.prompt(2, 40), slots)
        real = executor._programs.on(executor._device)
        scatter = real.scatter

        def consuming(*arguments):
            scatter(*arguments)
            out_of_memory()

        real.compiled["scatter"] = consuming
        try:
            [result] = await transport.submit([Copy(host.regions(kept), pages.regions(slots[11:]))]).future
        finally:
            real.compiled["scatter"] = scatter
        with pytest.raises(ExecutorFailed, match="page copy") as caught:
            await lab.decode(executor, token, 40, slots, 6)
        return result, caught.value, await lab.prefill(executor, lab.prompt(2, 40), slots), token

    result, failure, again, token = lab.run(main)
    assert "RESOURCE_EXHAUSTED" in str(result.error)
    assert failure.lost_pages
    assert again == token


def test_a_copy_that_raises_harms_nobody_else(lab):
    async def main():
        transport = Device()
        executor = lab.executor()
        pages = DevicePages("n0", executor)
        host = HostStore("n0", 4, lab.programs.page_bytes)
        transport.register(pages)
        transport.register(host)
        slots, kept = pages.reserve(12), host.reserve(1)
        token = await lab.prefill(executor, lab.prompt(2, 40), slots)
        want = await lab.decode(executor, token, 40, slots, 6)
        real, executor.read_pages = executor.read_pages, out_of_memory
        [result] = await transport.submit([Copy(pages.regions(slots[:1]), host.regions(kept))]).future
        executor.read_pages = real
        return result, want, await lab.decode(executor, token, 40, slots, 6)

    result, want, after = lab.run(main)
    assert "RESOURCE_EXHAUSTED" in str(result.error)
    assert after == want


def test_a_row_without_numbers_fails_alone(lab):
    heard = []

    async def main():
        executor = lab.executor()
        well, ill = PAGES[:6], PAGES[6:]
        token = await lab.prefill(executor, lab.prompt(3, 20), well)
        want = await lab.decode(executor, token, 20, well, 5)
        await lab.prefill(executor, lab.prompt(3, 20), ill)
        executor.poison(ill[1:2])
        items = [lab.item(Kind.DECODE, [token], 20, pages) for pages in (ill, well)]
        broken = await executor.run(StepPlan(items), 5, lambda step, tokens, _: heard.append((step, list(tokens))))
        part = lab.item(Kind.PREFILL, lab.prompt(4, 4), 20, ill, samples=False)
        chunk = await executor.run(StepPlan([part]), 1)
        return want, broken, chunk, await lab.decode(executor, token, 20, well, 5)

    want, broken, chunk, after = lab.run(main)
    assert broken.failed == {0: "its logits are not numbers"}
    assert (broken.steps, broken.finished) == (1, ())
    assert [tokens.tolist() for tokens in broken.tokens] == [[], want[:1]]
    assert heard == [(0, [None, want[0]])]
    assert list(chunk.failed) == [0]
    assert after == want


def test_pages_that_fit_nowhere_are_a_config_error(lab):
    geometry = Geometry(pages=2**31 - 2, page_tokens=8, max_batch=2, chunk_tokens=16, max_context_tokens=200)
    assert geometry.pages * lab.programs.page_bytes > 2**43, "a machine might have less than that"
    programs = Programs(lab.model, geometry)

    async def main():
        executor = JaxExecutor("huge", programs, jax.local_devices()[0])
        lab.executors.append(executor)
        with pytest.raises(ConfigError, match=r"backend\.pages=2147483646: [0-9.]+ GiB do not fit"):
            await executor.warm_up()

    lab.run(main)


def test_on_step_tells_each_step_before_the_answer_and_none_after(lab):
    async def main():
        executor = lab.executor()
        token = await lab.prefill(executor, lab.prompt(5, 20), PAGES)
        heard = []
        plan = StepPlan([lab.item(Kind.DECODE, [token], 20, PAGES), lab.item(Kind.DECODE, [1], 0, [20, 21])])
        run = asyncio.ensure_future(executor.run(plan, 9, lambda *told: heard.append((*told, run.done()))))
        progress = await run
        count = len(heard)
        await executor.on_thread(lambda: None)
        return progress, heard, count

    progress, heard, count = lab.run(main)
    assert count == len(heard) == 9
    assert [step for step, *_ in heard] == list(range(9))
    assert [end_ns for _, _, end_ns, _ in heard] == progress.ends_ns.tolist()
    assert not any(done for *_, done in heard)
    assert [list(tokens) for tokens in zip(*(tokens for _, tokens, _, _ in heard), strict=True)] == [
        tokens.tolist() for tokens in progress.tokens
    ]


def test_tokens_come_while_the_plan_still_runs(lab):
    """The thread is held in the middle of the plan until the loop has heard of the first steps."""

    async def main():
        executor = lab.executor()
        heard, go_on = [], threading.Event()
        step, calls = executor.step, [0]

        def waiting(call):
            calls[0] += 1
            assert calls[0] != 4 or go_on.wait(10)
            return step(call)

        executor.step = waiting

        def on_step(index, tokens, end_ns):
            heard.append(index)
            if index == 2:
                go_on.set()

        progress = await executor.run(StepPlan([lab.item(Kind.DECODE, [1], 0, PAGES)]), 6, on_step)
        return heard, progress.steps

    assert lab.run(main) == ([0, 1, 2, 3, 4, 5], 6)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_tells_whoever_waits(lab):
    async def main():
        transport = Device()
        executor = lab.executor("gone")
        pages = DevicePages("n0", executor)
        host = HostStore("n0", 4, lab.programs.page_bytes)
        transport.register(pages)
        transport.register(host)
        hold = threading.Event()
        executor.submit_host(lambda: hold.wait(10))
        executor.submit_host(sys.exit)
        copy = transport.submit([Copy(pages.regions([0]), host.regions([0]))]).future
        waiting = [
            asyncio.ensure_future(lab.decode(executor, 1, 0, PAGES, 3)),
            asyncio.ensure_future(executor.on_thread(lambda: None)),
            asyncio.ensure_future(executor.close()),
        ]
        await asyncio.sleep(0)
        hold.set()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        [result] = await copy
        with pytest.raises(InstanceDown):
            await lab.decode(executor, 1, 0, PAGES, 1)
        await executor.close()
        executor.stop()
        return ends, result

    ends, result = lab.run(main)
    assert [str(end) for end in ends] == ["instance gone is down", "instance gone is down", "None"]
    assert "instance gone is down" in str(result.error)


@pytest.mark.parametrize("blocking", [False, True], ids=["close", "stop"])
def test_a_device_that_does_not_come_back_is_waited_for_only_so_long(lab, blocking):
    async def main():
        executor = lab.executor("stuck")
        hold, step, heard = threading.Event(), executor.step, []
        in_step = threading.Event()

        def stuck(call):
            in_step.set()
            hold.wait(30)
            return step(call)

        executor.step = stuck
        plan = StepPlan([lab.item(Kind.DECODE, [1], 0, PAGES)])
        run = asyncio.ensure_future(executor.run(plan, 3, lambda *told: heard.append(told)))
        while not in_step.is_set():
            await asyncio.sleep(0)
        if blocking:
            executor.stop(patience_s=0.02)
        else:
            await executor.close(patience_s=0.02)
        with pytest.raises(InstanceDown):
            await run
        hold.set()
        await executor.close()
        await asyncio.sleep(0)
        return heard

    assert lab.run(main) == []


def test_closing_in_mid_step_ends_with_that_step(lab):
    async def main():
        executor = lab.executor()
        in_step, hold, step = threading.Event(), threading.Event(), executor.step

        def slow(call):
            in_step.set()
            assert hold.wait(10)
            return step(call)

        executor.step = slow
        run = asyncio.ensure_future(executor.run(StepPlan([lab.item(Kind.DECODE, [1], 0, PAGES)]), 50))
        while not in_step.is_set():
            await asyncio.sleep(0)
        close = asyncio.ensure_future(executor.close())
        await asyncio.sleep(0)
        hold.set()
        await close
        return (await run).steps

    assert lab.run(main) == 1


def test_pages_are_copied_on_the_device_bit_for_bit(lab):
    async def main():
        transport = Device()
        executor = lab.executor()
        pages = DevicePages("n0", executor, poison=True)
        transport.register(pages)
        pages.reserve(5)
        home, away = pages.reserve(11), pages.reserve(11)
        token = await lab.prefill(executor, lab.prompt(6, 80), home)
        want = await lab.kv(executor, home, 80)
        others = await lab.kv(executor, list(range(5)), 40)
        copies = [
            Copy(pages.regions(home[:10]), pages.regions(away[:10]), checksum=True),
            Copy(pages.regions(home[10:]), pages.regions(away[10:])),
        ]
        results = await transport.submit(copies).future
        reference = await lab.decode(executor, token, 80, home, 8)
        pages.free(home)  # poisons: what was only an alias would show
        copied = await lab.kv(executor, away, 80)
        after = await lab.decode(executor, token, 80, away, 8)
        stale = Copy(pages.regions(away[:2]), pages.regions(pages.reserve(2)))
        pages.free(away[:1])
        [late] = await transport.submit([stale]).future
        return want, copied, reference, after, results, late, others, await lab.kv(executor, list(range(5)), 40)

    want, copied, reference, after, results, late, others, untouched = lab.run(main)
    np.testing.assert_array_equal(copied, want)
    np.testing.assert_array_equal(untouched, others)
    assert after == reference
    assert [result.error for result in results] == [None, None]
    assert [len(result.checksums) for result in results] == [10, 0]
    assert len(set(results[0].checksums)) == 10
    assert type(late.error) is StaleRegion


def test_new_pages_do_not_cost_the_old_ones_twice(lab):
    """A failure that reaches the pages only when somebody waits for them counts as a loss, once."""

    async def main():
        executor = lab.executor()
        await lab.decode(executor, 1, 0, PAGES, 1)

        class Poisoned:
            def is_deleted(self):
                return False

            def block_until_ready(self):
                raise jax.errors.JaxRuntimeError("INTERNAL: it failed late")

        def late(call):
            with executor._pages.consumed():
                executor._pages.replace(Poisoned())
                jnp.zeros(3).block_until_ready()
                raise RuntimeError("the answer never came")

        step, executor.step = executor.step, late
        with pytest.raises(ExecutorFailed, match="never came") as caught:
            await lab.decode(executor, 1, 0, PAGES, 2)
        executor.step = step
        return caught.value.lost_pages, executor.losses, await lab.decode(executor, 1, 0, PAGES, 2)

    lost, losses, tokens = lab.run(main)
    assert (lost, losses, len(tokens)) == (True, 1, 2)
