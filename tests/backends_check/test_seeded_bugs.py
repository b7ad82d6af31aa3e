"""The checks find bugs: some are put in on purpose, and each makes the schedules fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from checking import ALL_FAULTS, run

from mcjax.backends.check.faults import Faults
from mcjax.backends.check.transport import CheckTransport
from mcjax.backends.check.world import CheckWorld
from mcjax.engine.service import Service
from mcjax.kvpool.holds import Hold, Pin
from mcjax.transfer.paths.attempt import Attempt


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

    async def forgetful(attempt: Attempt) -> None:
        nonlocal count
        count += 1
        if count == 7:
            await asyncio.get_running_loop().create_future()
        await once(attempt)

    engine._once = forgetful


def unsaved_evictions(service: Service, world: CheckWorld) -> None:
    """What must be saved before it leaves a node's host memory leaves all the same."""
    for node in service.cluster.nodes.values():
        saver: Any = node.pool.room.saver
        if saver is not None:
            saver.unsaved = lambda blocks: ()


def trusted_disks(service: Service, world: CheckWorld) -> None:
    """What comes from an SSD is taken for what was written there."""
    for node in service.cluster.nodes.values():
        ssd: Any = node.ssd
        if ssd is not None:
            ssd.checksums = lambda blocks: (b"",) * len(blocks)


ROTTEN = replace(ALL_FAULTS, rotten=20.0)

BUGS: list[tuple[Callable[[Service, CheckWorld], None], Faults, str]] = [
    (missed_unpin, ALL_FAULTS, "integrity"),
    (skipped_generation_check, ALL_FAULTS, "wrong"),
    (lost_completion, ALL_FAULTS, "hanging"),
    (unsaved_evictions, ALL_FAULTS, "unsaved"),
    (trusted_disks, ROTTEN, "wrong"),
]


SEEDS = range(40)


def test_without_a_bug_nothing_is_found() -> None:
    assert not any(run(seed, faults).problems for seed in SEEDS for faults in (ALL_FAULTS, ROTTEN))


@pytest.mark.parametrize(("bug", "faults", "kind"), BUGS, ids=[bug.__name__ for bug, *_ in BUGS])
def test_a_seeded_bug_is_found(bug: Callable[[Service, CheckWorld], None], faults: Faults, kind: str) -> None:
    broken = [run(seed, faults, bug) for seed in SEEDS]
    found = [outcome for outcome in broken if outcome.problems]
    assert found, "the bug went unnoticed"
    assert any(problem.startswith(kind) for outcome in found for problem in outcome.problems)


@pytest.mark.parametrize(("bug", "faults", "kind"), BUGS, ids=[bug.__name__ for bug, *_ in BUGS])
def test_a_failing_seed_fails_each_time(bug: Callable[[Service, CheckWorld], None], faults: Faults, kind: str) -> None:
    seed = next(seed for seed in SEEDS if run(seed, faults, bug).problems)
    first, again = run(seed, faults, bug), run(seed, faults, bug)
    assert first.problems
    assert first.problems == again.problems
