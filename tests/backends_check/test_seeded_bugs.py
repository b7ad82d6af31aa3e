"""The checks find bugs: three are put in on purpose, and each makes the schedules fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from checking import ALL_FAULTS, run

from mcjax.backends.check.transport import CheckTransport
from mcjax.backends.check.world import CheckWorld
from mcjax.engine.service import Service
from mcjax.kvpool.holds import Hold, Pin
from mcjax.transfer.base import Copy, CopyResult, Transport


def missed_unpin(service: Service, world: CheckWorld) -> None:
    """The third pin that each pool is given back stays."""
    for node in service.cluster.nodes.values():
        _forget_third_pin(node.pool)


def _forget_third_pin(pool: Any) -> None:
    release, count = pool.release, 0

    def forgetful(hold: Hold) -> None:
        nonlocal count
        if isinstance(hold, Pin) and len(hold):
            count += 1
            if count == 3:
                return
        release(hold)

    pool.release = forgetful


def skipped_generation_check(service: Service, world: CheckWorld) -> None:
    """Copies read and write slots that belong to somebody else by now."""
    for transport in world.transports():
        assert isinstance(transport, CheckTransport)
        transport.is_current = lambda copy: True  # type: ignore[method-assign]


def lost_completion(service: Service, world: CheckWorld) -> None:
    """The engine forgets to tell whoever waits for its seventh copy, and its deadline too."""
    engine: Any = service.engine
    once, count = engine._once, 0

    async def forgetful(transport: Transport, copy: Copy) -> CopyResult:
        nonlocal count
        count += 1
        if count == 7:
            await asyncio.get_running_loop().create_future()
        return await once(transport, copy)

    engine._once = forgetful


BUGS: list[tuple[Callable[[Service, CheckWorld], None], str]] = [
    (missed_unpin, "integrity"),
    (skipped_generation_check, "wrong"),
    (lost_completion, "hanging"),
]


@pytest.mark.parametrize(("bug", "kind"), BUGS, ids=lambda value: getattr(value, "__name__", value))
def test_a_seeded_bug_is_found(bug: Callable[[Service, CheckWorld], None], kind: str) -> None:
    seeds = range(60)
    sound = [run(seed, ALL_FAULTS) for seed in seeds]
    assert not any(outcome.problems for outcome in sound)
    broken = [run(seed, ALL_FAULTS, bug) for seed in seeds]
    found = [outcome for outcome in broken if outcome.problems]
    assert found, "the bug went unnoticed"
    assert any(problem.startswith(kind) for outcome in found for problem in outcome.problems)


@pytest.mark.parametrize(("bug", "kind"), BUGS, ids=lambda value: getattr(value, "__name__", value))
def test_a_failing_seed_fails_each_time(bug: Callable[[Service, CheckWorld], None], kind: str) -> None:
    seed = next(seed for seed in range(60) if run(seed, ALL_FAULTS, bug).problems)
    first, again = run(seed, ALL_FAULTS, bug), run(seed, ALL_FAULTS, bug)
    assert first.problems
    assert first.problems == again.problems
