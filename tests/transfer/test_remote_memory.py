"""The transfer engine over endpoints: blocks between a store here and one in another process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from conformance import PATIENCE_S, SECRET
from endpoint_kinds import KINDS
from endpoint_peer import Peer, pattern, peer_of

from mcjax.errors import (
    AccessRefused,
    LayoutMismatch,
    PeerLost,
    StaleRegion,
    TransferError,
)
from mcjax.kvpool.encodings.none import AsComputed
from mcjax.kvpool.stores.host import HostStore
from mcjax.transfer.base import Copy, Pacing
from mcjax.transfer.engine import TransferEngine
from mcjax.transfer.layout.describe import Layout, whole
from mcjax.transfer.transports.endpoint import RegionDescriptor
from mcjax.transfer.transports.remote import RemoteMemory, RemoteTransport, expose_memory
from mcjax.types import NullRecorder

ENDPOINTS = ["local", "shm", "tcp"]
BLOCKS = 24


class Pair:
    """A store here, and one at a peer of one kind of endpoint, with an engine that leads from one to the other."""

    def __init__(self, kind: str, peer: Peer, block_bytes: int, pacing: Pacing | None = None):
        self.peer = peer
        self._runner = asyncio.Runner()
        self.run = self._runner.run
        self.endpoint = KINDS[kind].make(SECRET)
        self.transport = RemoteTransport(self.endpoint, deadline_s=PATIENCE_S, pacing=pacing)
        self.engine = TransferEngine([self.transport], NullRecorder(), deadline_s=PATIENCE_S, attempts=2)
        self.near = HostStore("near", BLOCKS, block_bytes, huge_pages="never")
        self.descriptor = RegionDescriptor.from_json(peer.ask("memory", capacity=BLOCKS, block_bytes=block_bytes))
        self.far = RemoteMemory({kind: self.descriptor}, AsComputed(block_bytes))
        self.engine.register(self.near)
        self.engine.register(self.far)

    def reserve(self, count: int, seed: int | None = None):
        slots, epoch = self.peer.ask("reserve", key=self.descriptor.key, count=count, seed=seed)
        return self.far.region(slots, epoch)

    def free(self, slots: tuple[int, ...]) -> None:
        self.peer.ask("free", key=self.descriptor.key, slots=list(slots))

    def there(self, slots: tuple[int, ...]) -> list[str]:
        return self.peer.ask("block_digests", key=self.descriptor.key, slots=list(slots))

    def close(self) -> None:
        self._runner.close()
        self.transport.close()
        self.endpoint.close()
        self.near.check_integrity()
        self.near.check_idle()
        self.near.close()


@pytest.fixture(scope="module", params=ENDPOINTS)
def peer_kind(request: pytest.FixtureRequest) -> Iterator[tuple[str, Peer]]:
    peer = peer_of(request.param, SECRET)
    yield request.param, peer
    peer.close()


@pytest.fixture(params=[4096, 5000, 700_000])
def pair(request: pytest.FixtureRequest, peer_kind: tuple[str, Peer]) -> Iterator[Pair]:
    """Blocks of whole pages, and such that there is padding between slots."""
    pair = Pair(*peer_kind, request.param)
    yield pair
    pair.close()


@pytest.mark.parametrize("checksum", [False, True])
def test_blocks_come_from_another_process(pair: Pair, checksum: bool) -> None:
    source = pair.reserve(BLOCKS, seed=100)
    slots = tuple(reversed(pair.near.reserve(BLOCKS)))
    target = pair.near.regions(slots)

    result = pair.run(pair.engine.perform(Copy(source, target, 1, 0, checksum=checksum)))
    for far, near in zip(source.slots, slots, strict=True):
        assert (pair.near.buffer()[near] == pattern(pair.near.block_bytes, 100 + far)).all()
    digests = [xxhash.xxh3_128_digest(pair.near.buffer()[slot].tobytes()) for slot in slots]
    assert result.checksums == (tuple(digests) if checksum else ())
    assert pair.transport.stats().bytes_moved == BLOCKS * pair.near.block_bytes
    assert not pair.engine.in_flight


@pytest.mark.parametrize("checksum", [False, True])
def test_blocks_go_to_another_process(pair: Pair, checksum: bool) -> None:
    target = pair.reserve(BLOCKS)
    slots = pair.near.reserve(BLOCKS)
    for slot in slots:
        pair.near.buffer()[slot] = pattern(pair.near.block_bytes, slot)
    result = pair.run(pair.engine.perform(Copy(pair.near.regions(slots), target, 1, 0, checksum=checksum)))
    digests = [xxhash.xxh3_128(pair.near.buffer()[slot].tobytes()) for slot in slots]
    assert pair.there(target.slots) == [digest.hexdigest() for digest in digests]
    assert result.checksums == (tuple(digest.digest() for digest in digests) if checksum else ())


def test_slots_that_changed_hands_there_are_stale(pair: Pair) -> None:
    """The owner knows; nobody has told us."""
    mine, freed = pair.reserve(4, seed=100), pair.reserve(4, seed=100)
    pair.free(freed.slots)
    slots = pair.near.reserve(8)
    with pytest.raises(StaleRegion):
        pair.run(pair.engine.move(Copy(freed, pair.near.regions(slots[:4]))))
    with pytest.raises(StaleRegion):
        pair.run(pair.engine.move(Copy(pair.near.regions(slots[4:]), freed)))
    pair.run(pair.engine.move(Copy(mine, pair.near.regions(slots[:4]))))
    again = pair.reserve(4, seed=300)
    assert again.epoch > freed.epoch
    pair.run(pair.engine.move(Copy(again, pair.near.regions(slots[4:]))))
    assert (pair.near.buffer()[slots[4]] == pattern(pair.near.block_bytes, 300 + again.slots[0])).all()


def test_what_was_told_anew_makes_the_old_region_stale_here(pair: Pair) -> None:
    old = pair.reserve(4, seed=100)
    pair.free(old.slots)
    new = pair.reserve(4, seed=200)
    assert set(new.slots) == set(old.slots)
    assert not old.is_current()
    assert new.is_current()
    with pytest.raises(StaleRegion):
        pair.run(pair.engine.move(Copy(old, pair.near.regions(pair.near.reserve(4)))))


def test_slots_told_at_different_times_go_in_one_copy(pair: Pair) -> None:
    first = pair.reserve(3, seed=100)
    pair.free(pair.reserve(2).slots)  # the owner's epoch moves on
    second = pair.reserve(3, seed=100)
    assert second.epoch > first.epoch
    both = dataclasses.replace(second, slots=(*second.slots, *first.slots))
    slots = pair.near.reserve(6)
    result = pair.run(pair.engine.perform(Copy(both, pair.near.regions(slots), checksum=True)))
    for far, near, digest in zip(both.slots, slots, result.checksums, strict=True):
        assert (pair.near.buffer()[near] == pattern(pair.near.block_bytes, 100 + far)).all()
        assert digest == xxhash.xxh3_128_digest(pair.near.buffer()[near].tobytes())


def test_slots_never_told_are_not_read(pair: Pair) -> None:
    region = pair.reserve(1, seed=1)
    other = dataclasses.replace(region, slots=(region.slots[0], (region.slots[0] + 5) % BLOCKS))
    with pytest.raises(AccessRefused, match="never told"):
        pair.run(pair.engine.move(Copy(other, pair.near.regions(pair.near.reserve(2)))))


def test_a_local_slot_that_changes_hands_is_not_written(pair: Pair) -> None:
    source = pair.reserve(4, seed=100)
    slots = pair.near.reserve(4)
    target = pair.near.regions(slots)
    pair.near.free(slots)
    with pytest.raises(StaleRegion):
        pair.run(pair.engine.move(Copy(source, target)))
    assert not (pair.near.buffer()[slots[0]] == pattern(pair.near.block_bytes, 100 + source.slots[0])).all()


def test_copies_side_by_side_in_slices(peer_kind: tuple[str, Peer]) -> None:
    pair = Pair(*peer_kind, 70_000, Pacing(slice_bytes=140_000, window_bytes=300_000))
    try:
        source = pair.reserve(BLOCKS, seed=100)
        slots = pair.near.reserve(BLOCKS)

        async def all_at_once() -> None:
            parts = [list(range(start, start + 4)) for start in range(0, BLOCKS, 4)]
            whole = Copy(source, pair.near.regions(slots), checksum=True)
            await asyncio.gather(*(pair.engine.move(whole.part(part)) for part in parts))

        pair.run(all_at_once())
        for far, near in zip(source.slots, slots, strict=True):
            assert (pair.near.buffer()[near] == pattern(70_000, 100 + far)).all()
    finally:
        pair.close()


def test_a_caller_that_gives_up_leaves_nothing_held(pair: Pair) -> None:
    source, slots = pair.reserve(BLOCKS, seed=100), pair.near.reserve(BLOCKS)

    async def give_up() -> None:
        for turn in range(4):
            moving = asyncio.ensure_future(pair.engine.move(Copy(source, pair.near.regions(slots))))
            await asyncio.sleep(0.0005 * turn)
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)
        while pair.engine.in_flight:
            await asyncio.sleep(0.002)

    pair.run(asyncio.wait_for(give_up(), PATIENCE_S))


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_peer_that_dies_fails_its_copies_and_no_other(kind: str) -> None:
    mortal, other = peer_of(kind, SECRET), peer_of(kind, SECRET)
    pair = Pair(kind, mortal, 100_000)
    try:
        descriptor = RegionDescriptor.from_json(other.ask("memory", capacity=4, block_bytes=100_000))
        descriptor = dataclasses.replace(
            descriptor, layout={"slots": {**descriptor.layout["slots"], "name": "other.dram"}}
        )
        elsewhere = RemoteMemory({kind: descriptor}, AsComputed(100_000))
        pair.engine.register(elsewhere)
        slots, epoch = other.ask("reserve", key=descriptor.key, count=4, seed=7)
        source, near = pair.reserve(4, seed=1), pair.near.reserve(8)

        async def both() -> tuple[object, object]:
            await pair.engine.move(Copy(source, pair.near.regions(near[:4])))
            mortal.kill()
            return await asyncio.gather(
                pair.engine.move(Copy(source, pair.near.regions(near[:4]))),
                pair.engine.move(Copy(elsewhere.region(slots, epoch), pair.near.regions(near[4:]))),
                return_exceptions=True,
            )

        lost, came = pair.run(asyncio.wait_for(both(), 3 * PATIENCE_S))
        assert isinstance(lost, PeerLost)
        assert not isinstance(came, BaseException)
        assert (pair.near.buffer()[near[4]] == pattern(100_000, 7 + slots[0])).all()
    finally:
        pair.close()
        mortal.close()
        other.close()


def test_what_is_said_of_slots_is_checked(pair: Pair) -> None:
    block = pair.near.block_bytes
    with pytest.raises(LayoutMismatch, match="holds none"):
        RemoteMemory({"shm": pair.descriptor}, AsComputed(block + 1))
    slots = pair.descriptor.layout["slots"]
    nonsense = [None, [], {}, {**slots, "capacity": 0}, {**slots, "stride_bytes": block - 1}, {**slots, "tier": "x"}]
    for wrong in [*nonsense, {**slots, "name": 3}]:
        with pytest.raises(AccessRefused):
            RemoteMemory({"shm": dataclasses.replace(pair.descriptor, layout={"slots": wrong})}, AsComputed(block))
    more = dataclasses.replace(pair.descriptor, layout={"slots": {**slots, "capacity": BLOCKS + 1}})
    with pytest.raises(AccessRefused, match="not of one"):
        RemoteMemory({"shm": pair.descriptor, "tcp": more}, AsComputed(block))


def test_how_blocks_lie_travels_with_them_and_is_compared(pair: Pair) -> None:
    block = pair.near.block_bytes
    lies = whole("weights", 1, 1, 16, 4, "float32")
    told = dataclasses.replace(pair.descriptor, layout={**pair.descriptor.layout, "blocks": lies.to_values()})
    assert RemoteMemory({"shm": told}, AsComputed(block)).layout == lies
    assert RemoteMemory({"shm": told}, AsComputed(block), lies).layout == lies
    other = dataclasses.replace(lies, fingerprint="other")
    with pytest.raises(LayoutMismatch, match="model is weights, not other"):
        RemoteMemory({"shm": told}, AsComputed(block), other)
    for wrong in ([], "x", {}, {**lies.to_values(), "version": 9}):
        lying = dataclasses.replace(pair.descriptor, layout={**pair.descriptor.layout, "blocks": wrong})
        with pytest.raises(LayoutMismatch):
            RemoteMemory({"shm": lying}, AsComputed(block))
    pair.near.layout = lies
    exposed = expose_memory(pair.endpoint, pair.near)
    assert Layout.from_values(exposed.descriptor().layout["blocks"]) == lies


def test_more_slots_than_there_are_lead_nowhere(peer_kind: tuple[str, Peer]) -> None:
    pair = Pair(*peer_kind, 4096)
    try:
        slots = {**pair.descriptor.layout["slots"], "capacity": BLOCKS + 9, "name": "liar"}
        lie = dataclasses.replace(pair.descriptor, layout={"slots": slots})
        far = RemoteMemory({peer_kind[0]: lie}, AsComputed(4096))
        pair.engine.register(far)
        outside = far.region([BLOCKS + 8], 0)
        with pytest.raises(TransferError):
            pair.run(pair.engine.move(Copy(outside, pair.near.regions(pair.near.reserve(1)))))
    finally:
        pair.close()


def test_what_it_does_not_reach(pair: Pair) -> None:
    other = HostStore("elsewhere", 2, pair.near.block_bytes, huge_pages="never")
    assert pair.transport.reaches(pair.far, pair.near)
    assert pair.transport.reaches(pair.near, pair.far)
    assert not pair.transport.reaches(pair.near, pair.near)
    assert not pair.transport.reaches(pair.far, pair.far)
    assert not pair.transport.reaches(pair.far, other)
    pair.transport.deregister(pair.near)
    assert not pair.transport.reaches(pair.far, pair.near)
    with pytest.raises(AccessRefused):
        expose_memory(pair.endpoint, pair.far)
    assert np.array_equal(pair.far.told, np.full(BLOCKS, -1))
