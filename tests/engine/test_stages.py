"""Whatever ends a request, at whatever stage: it leaves nothing held, hurts nobody else, and its client hears at once.

`CheckBench.run` looks at pages, pins, leases, queues and reports afterwards: they are as if nobody had ever come.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from engine_fixtures import MS, CheckBench, expected
from hypothesis import given, settings
from hypothesis import strategies as st
from stages import stage_of

from mcjax import aio
from mcjax.backends.check.world import Sizes
from mcjax.engine.cluster_spec import InstanceSpec
from mcjax.engine.frontend import Ticket
from mcjax.engine.service import Service
from mcjax.errors import ExecutorFailed
from mcjax.sched.base import PrefillChoice
from mcjax.sched.view import ClusterView
from mcjax.types import NS_PER_S, Request, RequestRow, RequestState, Sampling

LONGEST_STEP_MS = 4
"""The longest step: who ends waits for the one that uses its pages, and for nothing else."""

HARMS = ("cancel", "timeout", "kill", "raise", "lost pages", "no numbers")

KEPT_FROM = 4

SMALL = Sizes(pages=20, pool_blocks=13, max_batch=3, chunk_tokens=6)
TIGHT = replace(SMALL, pages=23, pool_blocks=10)


@dataclass(frozen=True)
class Place:
    """Where a stage is looked for."""

    cluster: str
    sizes: Sizes


PLACES = {
    "waiting for room in a pool": Place("1p1d", TIGHT),
    "handed over, waiting for pages": Place("1p1d", TIGHT),
    "swapped out": Place("1p1d", SMALL),
    "fetching the prefix": Place("2p2d", SMALL),
    "loading to decode": Place("2p2d", SMALL),
    "streaming the last blocks": Place("2p2d", SMALL),
    "waiting for pages": Place("1m", TIGHT),
    "loading the prefix": Place("2m", SMALL),
    "swapping": Place("2p2d", SMALL),
    "computing": Place("1m", TIGHT),
    "decoding": Place("1m", TIGHT),
    "writing back": Place("1m", TIGHT),
}


class Alternate:
    """Every other request goes elsewhere, and takes the longest prefix there is with it."""

    def choose(self, request: Request, view: ClusterView, rng: np.random.Generator) -> PrefillChoice:
        there, source = request.request_id % len(view.names), int(view.prefix_tokens.argmax())
        reused = int(view.prefix_tokens[source])
        return PrefillChoice(there, source if reused > view.prefix_tokens[there] else None, reused)


class Play:
    """A first request leaves a prefix behind; six more come at once, more than there is room for.

    From seed `KEPT_FROM` on, blocks stay on the device.
    """

    def __init__(self, place: Place, seed: int):
        self.bench = CheckBench(
            place.cluster,
            sizes=place.sizes,
            seed=seed,
            headroom_tokens=1,
            attempts=40,
            hbm_cache=seed >= KEPT_FROM,
        )
        self.tickets: dict[int, Ticket] = {}
        self.submitted_ns: dict[int, int] = {}
        self.timeouts_s: dict[int, float] = {}

    def request(self, number: int) -> Request:
        prompt = [*range(13), *[number] * (number % 5 + 3)]
        sampling = Sampling(temperature=1.0, seed=number, n=2 if number == 4 else 1)
        timeout_s = self.timeouts_s.get(number)
        return self.bench.request(number, prompt, self.length(number), 16, sampling=sampling, timeout_s=timeout_s)

    @staticmethod
    def length(number: int) -> int:
        return 8 + 2 * (number % 4)

    async def begin(self, service: Service) -> None:
        conductor = service.conductor
        conductor._strategies = replace(conductor._strategies, prefill=Alternate())
        await service.frontend.submit(self.bench.request(1, range(17), 6)).task
        await aio.sleep_ns(30 * MS)
        for number in range(2, 8):
            self.submitted_ns[number] = aio.now_ns()
            self.tickets[number] = service.frontend.submit(self.request(number))
            await aio.sleep_ns(MS // 2)

    def check(self, row: RequestRow) -> None:
        """What there is of it is right; all of it, if it completed."""
        length = self.length(row.request.request_id)
        for index, output in enumerate([row.output, *[branch.output for branch in row.branches]]):
            assert output is not None
            right = expected(row.request, length, index)
            assert output == (right if row.state is RequestState.COMPLETED else right[: len(output)])


@functools.cache
def find(stage: str, seed: int) -> tuple[int, int] | None:
    """Which request is in this stage, and when, if nobody disturbs it."""
    play = Play(PLACES[stage], seed)
    found: list[tuple[int, int]] = []

    async def main(service: Service) -> None:
        beginning = aio.spawn(play.begin(service), "requests")
        while not found and not (beginning.done() and all(ticket.task.done() for ticket in play.tickets.values())):
            await aio.sleep_ns(MS // 10)
            for number, ticket in play.tickets.items():
                if not ticket.task.done() and stage_of(ticket.task) == stage and not found:
                    found.append((number, aio.now_ns()))
        await beginning
        for ticket in play.tickets.values():
            play.check(await ticket.task)

    play.bench.run(main)
    return found[0] if found else None


@pytest.mark.parametrize("stage", PLACES)
def test_each_stage_is_there_to_be_disturbed(stage: str) -> None:
    """Or what is below would prove nothing."""
    assert [find(stage, seed) for seed in range(KEPT_FROM)].count(None) <= 2


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("stage", PLACES)
@settings(max_examples=4)
@given(seed=st.integers(0, 2 * KEPT_FROM - 1), later_us=st.integers(0, 300))
def test_an_end_at_any_stage_is_as_if_it_had_never_come(stage: str, harm: str, seed: int, later_us: int) -> None:
    target = find(stage, seed)
    if target is None:
        return
    number, when_ns = target[0], target[1] + 1000 * later_us
    play = Play(PLACES[stage], seed)
    if harm == "timeout":
        play.timeouts_s[number] = (when_ns - submissions(PLACES[stage], seed)[number]) / NS_PER_S
    rows: dict[int, RequestRow] = {}

    async def main(service: Service) -> None:
        if harm != "timeout":
            aio.clock().call_at_ns(when_ns, disturb, play, service, number, harm)
        await play.begin(service)
        for other, ticket in play.tickets.items():
            rows[other] = await ticket.task

    play.bench.run(main)
    victim = rows.pop(number)
    play.check(victim)
    for row in rows.values():
        assert row.state is RequestState.COMPLETED, row.reason
        play.check(row)
    told_ns = victim.finish_ns - when_ns
    if harm == "cancel" and victim.state is not RequestState.COMPLETED:
        assert victim.state is RequestState.CANCELLED
        assert told_ns <= LONGEST_STEP_MS * MS
    elif harm == "timeout" and victim.state is not RequestState.COMPLETED:
        assert victim.state is RequestState.FAILED
        assert victim.reason.startswith("timeout after ")
        assert told_ns <= LONGEST_STEP_MS * MS
    elif harm == "no numbers" and victim.state is not RequestState.COMPLETED:
        assert victim.reason.endswith("its logits are not numbers")
    else:
        assert victim.state is RequestState.COMPLETED, victim.reason
    assert max(row.finish_ns for row in (*rows.values(), victim)) < 5 * NS_PER_S


@functools.cache
def submissions(place: Place, seed: int) -> dict[int, int]:
    play = Play(place, seed)

    async def main(service: Service) -> None:
        await play.begin(service)
        for ticket in play.tickets.values():
            await ticket.task

    play.bench.run(main)
    return play.submitted_ns


def disturb(play: Play, service: Service, number: int, harm: str) -> None:
    ticket, executors, cluster = play.tickets[number], play.bench.world.executors, service.cluster
    if ticket.task.done():
        return
    stages = {
        decision.stage: decision.choice for decision in play.bench.rows.decisions if decision.request_id == number
    }
    decodes = stage_of(ticket.task) in ("decoding", "swapped out", "swapping", "writing back", "loading to decode")
    name = stages.get("decode", stages["prefill"]) if decodes else stages["prefill"]
    if harm == "cancel":
        ticket.cancel()
    elif harm == "no numbers":
        for executor in executors.values():
            executor.to_break[number] = None
    elif harm == "raise":
        executors[name].problem = ExecutorFailed("MemoryError: no room")
    else:
        role = cluster.instances[name].role
        if harm == "kill":
            cluster.kill(name)
        else:
            executors[name].problem = ExecutorFailed("RuntimeError: device lost", lost_pages=True)
        aio.clock().call_at_ns(aio.now_ns() + 10 * MS, cluster.join, InstanceSpec(f"{name}b", role))
