"""A measured machine in virtual time: who computes slows whom, copies wait for steps, and a run repeats itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import mcjax
from mcjax import aio
from mcjax.backends.sim.host import Host, HostThread, Job
from mcjax.backends.sim.host_executor import HostExecutor
from mcjax.backends.virtual import VirtualLoop
from mcjax.cost.measured import LASTING_NS, Copies, Line, Machine, Measured, Overheads, Sizes, Spread, write
from mcjax.cost.measurements import Measurement
from mcjax.engine.base import Capacity, Kind, StepItem, StepPlan
from mcjax.errors import ConfigError
from mcjax.types import Sampling, Script

T = TypeVar("T")
CHUNK_NS, STEP_NS = 4_000, 1_000
ROWS = (
    *(Measurement("prefill", start, length, 0, 0, CHUNK_NS / 1e9) for start in (0, 512) for length in (16, 128)),
    *(Measurement("decode", 0, 0, batch, batch * at, STEP_NS / 1e9) for batch in (1, 4) for at in (0, 512)),
)
MACHINE = Machine(
    hardware="cpu",
    model="builtin-tiny",
    sizes=Sizes(256, 32, 4, 128, 1664, 512, shares_decoded=False),
    steps=ROWS,
    slowdown={"prefill": {"decode": 2.0}},
    copies=Copies(Line(100, 10), Line(200, 20), Line(50, 5)),
    overheads=Overheads(prefill_idle_ns=700, prefill_plan_ns=300, decode_plan_ns=200, copy_ns=100),
)


def virtually(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return VirtualLoop().run(main)


class Scripts:
    def script(self, request_id: int) -> Script:
        return Script(10)


def item(kind: Kind, start: int = 0, length: int = 1, request: int = 0, generated: int = 0) -> StepItem:
    return StepItem(request, kind, start, length, [0, 1], Sampling(), generated=generated)


def executor(host: Host, machine: Machine = MACHINE) -> tuple[HostExecutor, HostThread]:
    thread = HostThread(host)
    capacity = Capacity(256, 32, 1, 4, 128, 1664)
    rng = np.random.default_rng(0)
    return HostExecutor("x", capacity, Measured(machine), Scripts(), host, thread, machine, rng), thread


def test_work_slows_work_for_as_long_as_both_run() -> None:
    async def main() -> dict[str, int]:
        host = Host({"a": {"b": 2.0}})
        ends: dict[str, int] = {}
        host.start("a", 1000, lambda: ends.setdefault("a", aio.now_ns()))
        await aio.sleep_ns(400)
        host.start("b", 300, lambda: ends.setdefault("b", aio.now_ns()))
        await aio.sleep_ns(5000)
        return ends

    # 400 alone, 300 at half the rate beside b (150 done), the other 450 alone.
    assert virtually(main) == {"b": 700, "a": 1150}


def test_several_neighbours_add_up() -> None:
    async def main() -> list[int]:
        host = Host({"a": {"b": 1.5, "a": 1.25}})
        ends: list[int] = []
        for kind in ("a", "a", "b", "b"):
            host.start(kind, 1000, lambda: ends.append(aio.now_ns()))
        await aio.sleep_ns(9000)
        return ends

    # Two b and an a beside: 1 + 0.5 + 0.5 + 0.25, until 1000. The rest of each a (1000 - 1000 / 2.25) goes at 1 / 1.25.
    assert virtually(main) == [1000, 1000, 1695, 1695]


def test_a_thread_does_one_thing_at_a_time_and_goes_on_where_told() -> None:
    async def main() -> list[tuple[str, int]]:
        thread = HostThread(Host({}))
        said: list[tuple[str, int]] = []

        def say(what: str, following: Job | None = None) -> Job:
            def ended() -> Job | None:
                said.append((what, aio.now_ns()))
                return following

            return Job("copy", 100, ended)

        thread.submit(say("first", say("at once")))
        thread.submit(say("second"))
        await aio.sleep_ns(1000)
        thread.submit(say("later"))
        await aio.sleep_ns(1000)
        return said

    assert virtually(main) == [("first", 100), ("at once", 200), ("second", 300), ("later", 1100)]


def test_plans_are_handed_over_and_copies_go_between_steps() -> None:
    async def main() -> tuple[list[int], list[int], list[int]]:
        host = Host(MACHINE.slowdown)
        own, thread = executor(host)
        chunk = await own.run(StepPlan([item(Kind.PREFILL, 0, 128)]), 5)
        again = await own.run(StepPlan([item(Kind.PREFILL, 128, 128)]), 5)
        start_ns = aio.now_ns()
        aio.clock().call_at_ns(start_ns + 500, thread.submit, Job("copy", 50, lambda: None))
        steps = await own.run(StepPlan([item(Kind.DECODE, 200, generated=7)]), 8)
        assert (steps.steps, steps.finished) == (3, (0,))  # the script ends after ten tokens
        assert own.busy_ns() == 2 * CHUNK_NS + 3 * STEP_NS + 50
        assert own.step_ends_ns().size == 0
        return (
            [chunk.start_ns, *chunk.ends_ns.tolist()],
            [again.start_ns, *again.ends_ns.tolist()],
            [ns - start_ns for ns in (steps.start_ns, *steps.ends_ns.tolist())],
        )

    first, second, decode = virtually(main)
    assert first == [700, 4700]
    assert second == [5000, 9000]  # it followed at once: a shorter hand-off
    assert decode == [200, 1200, 2250, 3250]


def test_an_interrupt_and_a_cancel_end_at_the_next_boundary() -> None:
    async def main() -> tuple[int, list[int]]:
        own, thread = executor(Host({}))
        clock = aio.clock()
        clock.call_at_ns(1500, own.interrupt)
        progress = await own.run(StepPlan([item(Kind.DECODE, 200)]), 8)
        task = asyncio.ensure_future(own.run(StepPlan([item(Kind.DECODE, 200)]), 8))
        await aio.sleep_ns(500)
        task.cancel()
        said: list[int] = []
        thread.submit(Job("copy", 10, lambda: said.append(aio.now_ns())))
        await aio.sleep_ns(9000)
        return progress.steps, said

    steps, said = virtually(main)
    assert steps == 2  # the first ended at 1200, the second was under way
    assert said == [2200 + 200 + STEP_NS + 10]


def test_steps_spread_as_they_were_measured_to() -> None:
    async def main() -> list[list[int]]:
        host = Host({})
        machine = replace(MACHINE, spread={"decode": Spread((1.0, 10.0), (0.9, 1.0, 1.1))})
        (one, _), (other, _) = executor(host, machine), executor(host, machine)
        windows: list[list[int]] = []
        for _ in range(20):
            plan = StepPlan([item(Kind.DECODE, 200)])
            found = [await own.run(plan, 10) for own in (one, other)]
            windows.append([ns for p in found for ns in np.diff(p.ends_ns, prepend=p.start_ns).tolist()])
            await aio.sleep_ns(LASTING_NS)
        return windows

    windows = virtually(main)
    assert windows == virtually(main)
    for durations in windows:  # for a while the machine is slow for everybody
        assert max(durations) > min(durations)
        assert max(durations) / min(durations) <= 1.1 / 0.9 + 0.01
    slowest, fastest = max(map(max, windows)), min(map(min, windows))
    assert fastest >= 0.9 * STEP_NS
    assert 4 * fastest < slowest <= 11 * STEP_NS


@pytest.fixture
def measured(tmp_path: Path) -> list[str]:
    write(MACHINE, tmp_path / "m.json")
    return ["backend=sim", "cost=measured", f"cost.path='{tmp_path / 'm.json'}'", "workload.sessions=3", "track=none"]


def test_a_run_on_a_measured_machine_repeats_itself(measured: list[str]) -> None:
    first, again = mcjax.run(measured), mcjax.run(measured)
    assert first.summary["requests"]["completed"] == 12
    assert first.summary["digest"] == again.summary["digest"]
    assert set(first.summary["bytes_by_transport"]) == {"device", "local"}
    blocks = first.summary["bytes_by_transport"]["device"] / (32 * 2048)
    assert blocks == int(blocks) > 0
    # As in the engine that was measured, no other request finds what decode filled.
    assert first.summary["prefix_hit_rate"]["token"] < 0.9


def test_what_a_measured_machine_has_not_is_refused(measured: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"kvpool\.block_tokens"):
        mcjax.run([*measured, "kvpool.block_tokens=16"])
    with pytest.raises(ConfigError, match=r"backend\.spine_bytes_per_s"):
        mcjax.run([*measured, "backend.spine_bytes_per_s=1e9"])


def test_hand_offs_spread_too() -> None:
    async def main() -> list[int]:
        overheads = replace(MACHINE.overheads, factors=(1.0, 1.0, 5.0))
        own, _ = executor(Host({}), replace(MACHINE, overheads=overheads))
        starts: list[int] = []
        for _ in range(40):
            begun_ns = aio.now_ns()
            progress = await own.run(StepPlan([item(Kind.DECODE, 200)]), 1)
            starts.append(progress.start_ns - begun_ns)
        return starts

    starts = sorted(virtually(main))
    assert starts[0] == 200
    assert 600 < starts[-1] <= 1000
    assert starts == sorted(virtually(main))
