"""Copies between host memories in one process: in slices by class, and small scattered blocks packed on their way."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from mcjax.kvpool.stores.host import HostStore
from mcjax.transfer.base import Copy, Pacing
from mcjax.transfer.engine import TransferEngine
from mcjax.transfer.paths.path import PathSettings
from mcjax.transfer.transports.local import PACKED_BYTES, Local
from mcjax.types import NullRecorder


def filled(name: str, blocks: int, block_bytes: int, seed: int) -> HostStore:
    store = HostStore(name, blocks, block_bytes)
    store.buffer()[:] = np.random.default_rng(seed).integers(0, 256, (blocks, block_bytes), np.uint8)
    return store


def bytes_of(store: HostStore, slots: list[int]) -> bytes:
    return store.buffer()[slots].tobytes()


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("block_bytes", [1, 100, PACKED_BYTES, PACKED_BYTES + 1, 5000])
@pytest.mark.parametrize("order", ["straight", "scattered", "half"])
def test_every_block_is_where_it_should_be_and_no_other_has_changed(
    order: str, block_bytes: int, checksum: bool
) -> None:
    source, target = filled("a", 300, block_bytes, 1), filled("b", 300, block_bytes, 2)
    rng = np.random.default_rng(3)
    here, there = sorted(source.reserve(200)), sorted(target.reserve(200))
    if order != "straight":
        rng.shuffle(here)
    if order == "scattered":
        rng.shuffle(there)
    others = [slot for slot in range(300) if slot not in there]
    before = bytes_of(target, others)
    local = Local()

    async def main() -> tuple[bytes, ...]:
        settings = PathSettings(slice_bytes=7 * block_bytes, window_bytes=20 * block_bytes)
        engine = TransferEngine([local], NullRecorder(), settings=settings)
        engine.register(source)
        engine.register(target)
        copy = Copy(source.regions(here), target.regions(there), checksum=checksum)
        return (await engine.perform(copy)).checksums

    try:
        checksums = asyncio.run(main())
    finally:
        local.close()
    assert bytes_of(target, there) == bytes_of(source, here)
    assert bytes_of(target, others) == before
    assert len(checksums) == (200 if checksum else 0)


def test_a_higher_class_goes_by_a_long_copy_that_has_begun() -> None:
    ended: list[str] = []
    source, target = filled("a", 600, 1 << 16, 1), filled("b", 600, 1 << 16, 2)
    local = Local()
    assert isinstance(local.pacing, Pacing)

    async def main() -> None:
        settings = PathSettings(slice_bytes=1 << 16, window_bytes=1 << 18)
        engine = TransferEngine([local], NullRecorder(), settings=settings)
        engine.register(source)
        engine.register(target)

        async def move(name: str, blocks: int, priority: int) -> None:
            here, there = source.regions(source.reserve(blocks)), target.regions(target.reserve(blocks))
            await engine.perform(Copy(here, there, priority=priority))
            ended.append(name)

        await asyncio.gather(move("long", 500, 0), move("late but urgent", 3, 1))
        (path,) = engine.paths.values()
        assert (path.in_flight, path.queued_bytes) == (0, 0)

    try:
        asyncio.run(main())
    finally:
        local.close()
    assert ended == ["late but urgent", "long"]
