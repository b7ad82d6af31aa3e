"""Measures a machine's engine for `cost=measured`: steps alone and beside each other, copies, hand-offs.

Everything goes through the seams that the engine itself uses (`Executor.run`, `Transport.submit`), so what is timed is
what a run would pay, whatever programs are behind them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from mcjax import aio
from mcjax.app.validation.found import Found
from mcjax.backends.base import World
from mcjax.engine.base import Executor, InstanceParts, Kind, StepItem, StepPlan
from mcjax.engine.cluster_spec import InstanceSpec
from mcjax.errors import ConfigError
from mcjax.kvpool.base import BlockStore
from mcjax.transfer.base import Copy, Transport
from mcjax.types import NS_PER_S, Role, Sampling

TOKEN_IDS = 200
"""Prompts are made of ids below it: any vocabulary has them."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    rounds: int = 4
    """Passes over all points; a point's time is the median of its passes."""
    patience_s: float = 40.0
    """Of a slow model fewer passes are made, at least two."""
    repeats: int = 2
    """Chunks of a point in one pass."""
    steps: int = 16
    """Decode steps of a point in one pass."""
    starts: int = 4
    """Cached lengths that chunks are measured after."""
    contexts: int = 4


LEAST_ROUNDS = 2
LONGEST_REST_NS = 500_000_000
PAUSE_NS = 40_000_000
"""Before each chunk: most prompts come to an idle instance, whose weights and threads the caches have forgotten. On
one machine chunks right after another took a fifth less than those of real runs, after this pause a third more where
nothing ran beside them: see docs/validate.md."""

QUICK = Effort(rounds=1, repeats=1, steps=4, starts=2, contexts=2)


@dataclass(slots=True)
class Bench:
    """The instances that are measured: one that computes prompts, one that decodes (or the same), and their memory."""

    prefill: InstanceParts
    decode: InstanceParts
    pools: tuple[BlockStore, BlockStore]
    transports: Sequence[Transport]

    @property
    def apart(self) -> bool:
        return self.prefill.executor is not self.decode.executor


async def calibrate(
    world: World, instances: Sequence[InstanceSpec], effort: Effort, report: Callable[[str, float], None]
) -> Found:
    """Measure the world's first instance that computes prompts and its first that decodes.

    Raises `ConfigError` for a cluster without one of them.
    """
    await world.prepare([(spec.name, spec.role) for spec in instances], lambda what, share: report(what, share / 2))
    bench = _bench(world, instances)
    found = Found()
    await _fill(bench)
    began_ns = aio.now_ns()
    for done in range(effort.rounds):
        if done >= LEAST_ROUNDS and aio.now_ns() - began_ns > effort.patience_s * NS_PER_S:
            break
        share = 0.5 + 0.5 * done / effort.rounds
        report("measuring copies", share)
        await _copies(bench, found)
        for beside in (False, True) if bench.apart else (False,):
            company = "beside" if beside else "without"
            report(f"measuring chunks {company} decode steps", share)
            await _chunks(bench, effort, found, beside, done)
            report(f"measuring decode steps {company} chunks", share)
            await _steps(bench, effort, found, beside, done)
    report("measured", 1.0)
    return found


def _bench(world: World, instances: Sequence[InstanceSpec]) -> Bench:
    first = next((spec for spec in instances if spec.role is not Role.DECODE), None)
    second = next((spec for spec in instances if spec.role is not Role.PREFILL), None)
    if first is None or second is None:
        raise ConfigError("cluster", [spec.name for spec in instances], "needs an instance for prompts, one for decode")
    names = dict.fromkeys([(first.name, first.role), (second.name, second.role)])
    parts = {name: world.instance(name, f"node-{name}", role) for name, role in names}
    pools = {name: world.pool_store(f"node-{name}") for name, _ in names}
    memories = [*(part.pages for part in parts.values()), *pools.values()]
    transports = world.transports()
    for transport in transports:
        for memory in memories:
            transport.register(memory)
    return Bench(parts[first.name], parts[second.name], (pools[first.name], pools[second.name]), transports)


# Steps


def _context_pages(executor: Executor, row: int = 0) -> list[int]:
    """Pages of a full context; rows have their own as far as there are enough."""
    capacity = executor.capacity()
    count = -(-capacity.max_context_tokens // capacity.page_tokens)
    return [(row * count + page) % capacity.pages for page in range(count)]


async def _chunk(executor: Executor, start: int, length: int) -> float:
    """Nanoseconds of one chunk, as the executor tells it."""
    tokens = (np.arange(length) % TOKEN_IDS).astype(np.int32)
    item = StepItem(0, Kind.PREFILL, start, length, _context_pages(executor), Sampling(), tokens)
    progress = await executor.run(StepPlan([item]), 1)
    return float(progress.ends_ns[-1] - progress.start_ns)


async def _decode(executor: Executor, batch: int, context: int, steps: int) -> list[float]:
    """Nanoseconds of each of some decode steps of one plan."""
    items = [
        StepItem(row, Kind.DECODE, context, 1, _context_pages(executor, row), Sampling(), np.ones(1, np.int32))
        for row in range(batch)
    ]
    progress = await executor.run(StepPlan(items), steps)
    return np.diff(progress.ends_ns, prepend=progress.start_ns).astype(np.float64).tolist()


async def _fill(bench: Bench) -> None:
    """Give every page that will be read a valid content, so that no step fails for its logits."""
    capacity = bench.prefill.executor.capacity()
    chunk, context = capacity.chunk_tokens, capacity.max_context_tokens
    for start in range(0, context, chunk):
        await _chunk(bench.prefill.executor, start, min(chunk, context - start))
    if not bench.apart:
        return
    count = min(-(-context // capacity.page_tokens), min(pool.capacity for pool in bench.pools))
    slots = list(range(count))
    first, second = bench.pools
    await _move(bench, bench.prefill.pages, first, slots, slots, checksum=True)
    await _move(bench, first, second, slots, slots)
    for row in range(capacity.max_batch):
        pages = _context_pages(bench.decode.executor, row)[:count]
        await _move(bench, second, bench.decode.pages, slots, pages, checksum=True)


async def _chunks(bench: Bench, effort: Effort, found: Found, beside: bool, turn: int) -> None:
    executor, other = bench.prefill.executor, bench.decode.executor
    times = found.prefill_beside if beside else found.prefill_alone
    capacity = other.capacity()
    batch, context = max(1, capacity.max_batch // 2), capacity.max_context_tokens

    async def decode_on() -> None:
        while True:
            await _decode(other, batch, context // 4, max(1, context // 2))

    async with _company(decode_on if beside else None, other):
        for start, length in _from(_chunk_points(executor, effort), turn, effort.rounds):
            last: list[float] = []
            for _ in range(effort.repeats):
                await aio.sleep_ns(PAUSE_NS)
                last.append(await _chunk(executor, start, length))
            times[start, length].append(last)


async def _steps(bench: Bench, effort: Effort, found: Found, beside: bool, turn: int) -> None:
    executor, other = bench.decode.executor, bench.prefill.executor
    times = found.decode_beside if beside else found.decode_alone
    last: list[float] = []
    capacity = other.capacity()
    length = min(capacity.chunk_tokens, capacity.max_context_tokens)

    async def chunk_on() -> None:
        while True:
            await _chunk(other, (capacity.max_context_tokens - length) // 2, length)

    async with _company(chunk_on if beside else None, other):
        for batch, context in _from(_decode_points(executor, effort), turn, effort.rounds):
            await _rest(last)
            last = await _decode(executor, batch, context, effort.steps)
            times[batch, context].append(last)


def _from(points: list[tuple[int, int]], turn: int, turns: int) -> list[tuple[int, int]]:
    """Every pass begins at another point, so that none always comes first after something else."""
    first = turn * len(points) // turns
    return points[first:] + points[:first]


async def _rest(last: Sequence[float]) -> None:
    """As long as the last pass took, as instances rest between their plans.

    Of a machine that others use too, who computes all the time gets less than who has just waited.
    """
    await aio.sleep_ns(min(LONGEST_REST_NS, round(sum(last))))


class _company:
    """Runs a procedure on another executor for the time being; ends it, and its step, at the end."""

    def __init__(self, procedure: Callable[[], Any] | None, executor: Executor):
        self._procedure = procedure
        self._executor = executor
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        if self._procedure is not None:
            self._task = aio.spawn(self._procedure(), "company")
            await aio.sleep_ns(1_000_000)

    async def __aexit__(self, *problem: object) -> None:
        if self._task is not None:
            await aio.settle(self._task)


def _chunk_points(executor: Executor, effort: Effort) -> list[tuple[int, int]]:
    """(start, length): from an empty cache to a nearly full one, of a short chunk, half a one and a full one."""
    capacity = executor.capacity()
    chunk = min(capacity.chunk_tokens, capacity.max_context_tokens)
    last = capacity.max_context_tokens - chunk
    if last < 1:
        problem = f"must be less than backend.max_context_tokens={capacity.max_context_tokens} to be measured"
        raise ConfigError("backend.chunk_tokens", capacity.chunk_tokens, problem)
    starts = sorted({last * at // (effort.starts - 1) for at in range(effort.starts)})
    lengths = sorted({max(1, chunk // 8), max(1, chunk // 2), chunk})
    return [(start, length) for start in starts for length in lengths]


def _decode_points(executor: Executor, effort: Effort) -> list[tuple[int, int]]:
    """(batch, context of each): powers of two up to the whole batch, from short contexts to long ones."""
    capacity = executor.capacity()
    batches = sorted({1, capacity.max_batch} | {1 << power for power in range(capacity.max_batch.bit_length())})
    far = _far(executor, effort.steps)
    contexts = sorted({max(1, far * at // (effort.contexts - 1)) for at in range(effort.contexts)})
    return [(batch, context) for batch in batches if batch <= capacity.max_batch for context in contexts]


def _far(executor: Executor, steps: int) -> int:
    """The longest context that so many steps can follow; half of what there is if the steps are too many."""
    capacity = executor.capacity()
    return max(1, capacity.max_context_tokens - min(steps, capacity.max_context_tokens // 2))


# Copies


async def _copies(bench: Bench, found: Found) -> None:
    first, second = bench.pools
    most = min(len(_context_pages(bench.prefill.executor)), first.capacity, second.capacity)
    for count in sorted({1, most} | {size for size in (2, 4, 8, 16, 32, 64) if size < most}):
        slots = list(range(count))
        found.off_device[count].append(await _move(bench, bench.prefill.pages, first, slots, slots, checksum=True))
        if bench.apart:
            found.between_hosts[count].append(await _move(bench, first, second, slots, slots))
        target = bench.decode.pages
        found.onto_device[count].append(
            await _move(bench, second if bench.apart else first, target, slots, slots, checksum=True)
        )
    if not bench.apart:  # one node: nothing is ever copied between hosts
        found.between_hosts[1].append(1.0)


async def _move(
    bench: Bench, source: BlockStore, target: BlockStore, slots: list[int], places: list[int], checksum: bool = False
) -> float:
    """Copy, and return the nanoseconds from the submission to the answer. Raises what the copy failed with."""
    copy = Copy(source.regions(slots), target.regions(places), checksum=checksum)
    transport = next(t for t in bench.transports if t.reaches(source, target))
    clock = cast("aio.WallClock", aio.clock())
    answered: asyncio.Future[Any] = aio.new_future()
    began_ns = clock.wall_ns()
    transport.submit([copy]).when_answered(answered.set_result)
    (result,) = await answered
    if result.error is not None:
        raise result.error
    return float(aio.now_ns() - began_ns)
