"""A disk that is full, breaks, hangs or crawls: every copy ends with a typed error, and the tier stands aside."""

from __future__ import annotations

import asyncio
import errno
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcjax.errors import BlockCorrupt, ConfigError, TierUnavailable, TransferError
from mcjax.transfer.base import Copy
from mcjax.transfer.engine import TransferEngine
from mcjax.transfer.transports.disk import Disk, Health, ShortFile, whole
from mcjax.transfer.transports.file import FileTransport
from mcjax.types import NullRecorder
from ssd_fixtures import SsdTier, key_of, payload_of

SECOND_NS = 1_000_000_000


class Faulty(Disk):
    """The real disk, but for calls that are told to fail, and a clock that calls can move."""

    def __init__(self):
        self.now_ns = 0
        self.took_ns = 0
        """Of each call."""
        self.errors: dict[str, int] = {}
        """"read", "write" or "sync" -> the error number it fails with."""
        self.calls = 0

    def clock(self) -> int:
        return self.now_ns

    def _call(self, what: str) -> None:
        self.calls += 1
        self.now_ns += self.took_ns
        if what in self.errors:
            raise OSError(self.errors[what], os.strerror(self.errors[what]))

    def read(self, file, views, offset):
        self._call("read")
        return super().read(file, views, offset)

    def write(self, file, views, offset):
        self._call("write")
        return super().write(file, views, offset)

    def sync(self, file):
        self._call("sync")
        super().sync(file)


def faulty(folder, **options) -> tuple[SsdTier, Faulty]:
    disk = Faulty()
    return SsdTier(folder, disk=disk, now_ns=disk.clock, threads=1, **options), disk


def write(tier: SsdTier, chain: int) -> TransferError | None:
    copy = tier.staged(chain, [0])
    [result] = tier.run(copy)
    tier.store.free(copy.target.slots)
    return result.error


@pytest.mark.parametrize("what", ["write", "sync"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_write_that_fails_is_typed_and_leaves_no_block(tmp_path, what, number):
    tier, disk = faulty(tmp_path)
    disk.errors[what] = number
    error = write(tier, 0)
    assert type(error) is TierUnavailable
    assert os.strerror(number) in str(error)
    assert "n.ssd" in str(error)
    disk.errors.clear()
    assert write(tier, 1) is None
    tier.close()


def test_a_read_that_fails_is_typed_and_the_rest_of_the_batch_goes_on(tmp_path):
    class BadSector(Disk):
        def read(self, file, views, offset):
            if offset == bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(file, views, offset)

    tier = SsdTier(tmp_path, disk=BadSector())
    slots = tier.put(0, [0, 1, 2])
    _, bad = tier.store.place(slots[1])
    copies = [Copy(tier.store.regions([slot]), tier.host.regions([n + 3])) for n, slot in enumerate(slots)]
    results = tier.run(*copies)
    assert [type(result.error) for result in results] == [type(None), TierUnavailable, type(None)]
    assert tier.host.buffer()[5].tobytes() == payload_of(key_of(0, 2))
    tier.close()


class BadPlaces(Disk):
    """Cannot read, or write, at some offsets."""

    def __init__(self, size: int):
        self.size = size
        self.bad: set[int] = set()

    def _look(self, views, offset):
        if any(at < offset + sum(map(len, views)) and offset < at + self.size for at in self.bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def read(self, file, views, offset):
        self._look(views, offset)
        return super().read(file, views, offset)

    def write(self, file, views, offset):
        self._look(views, offset)
        return super().write(file, views, offset)


@pytest.mark.parametrize("block_bytes", [8192, 5000])
def test_of_neighbours_read_together_only_the_unreadable_one_has_no_checksum(tmp_path, block_bytes):
    tier = SsdTier(tmp_path, block_bytes=block_bytes, disk=(disk := BadPlaces(12288)), failures=3)
    slots = tier.put(0, [0, 1, 2, 3])
    disk.bad = {tier.store.place(slots[2])[1]}
    for _ in range(5):
        result = tier.read(slots)
        assert result.error is None
        assert result.checksums == (*map(tier.checksum, slots[:2]), b"", tier.checksum(slots[3]))
        assert tier.read([slots[2]]).checksums == (b"",)
    for at in (0, 1, 3):
        assert tier.read([slots[at]]).checksums == (tier.checksum(slots[at]),)
    stats = tier.transport.stats()
    assert stats.unavailable == (), "a bad place is no bad disk"
    assert stats.device_failures > 5
    disk.bad = set(range(0, 8 * 12288, 12288))
    assert type(tier.read(slots).error) is TierUnavailable
    assert tier.transport.stats().unavailable == ("n.ssd: reads",)
    tier.close()


def test_an_unreadable_block_that_nobody_could_compare_is_an_error(tmp_path):
    tier = SsdTier(tmp_path, disk=(disk := BadPlaces(12288)))
    copy = tier.staged(0, [0])
    assert tier.run(copy)[0].error is None
    tier.store.commit(copy.target.slots, tier.blocks(0, [0]), [b""])
    disk.bad = {tier.store.place(copy.target.slots[0])[1]}
    assert type(tier.read(copy.target.slots).error) is TierUnavailable
    tier.close()


def test_where_the_disk_could_not_write_is_tried_again_last(tmp_path):
    tier = SsdTier(tmp_path, disk=(disk := BadPlaces(12288)), capacity=4, failures=3)
    copy = tier.staged(0, [0])
    [bad] = copy.target.slots
    disk.bad = {tier.store.place(bad)[1]}
    assert type(tier.run(copy)[0].error) is TierUnavailable
    tier.store.free([bad])
    for chain in range(1, 4):
        assert bad not in tier.put(chain, [0])
    assert tier.store.free_slots == 1
    disk.bad.clear()
    assert tier.put(4, [0]) == [bad]
    tier.store.free([bad])
    assert tier.store.reserve(1) == [bad]
    tier.store.check_integrity()
    tier.close()


@pytest.mark.parametrize("left", [0, 4096, 5000, 8192])
def test_a_file_that_ends_too_soon_says_that_the_block_is_not_there(tmp_path, left):
    tier = SsdTier(tmp_path)
    [slot] = tier.put(0, [0])
    _, offset = tier.store.place(slot)
    os.truncate(tmp_path / "slab-00000", offset + left)
    error = tier.read([slot]).error
    # A disk that refuses what is no whole page is as good an answer as one that says where the file ends.
    assert isinstance(error, BlockCorrupt | TierUnavailable)
    assert tier.transport.stats().unavailable == ()
    tier.close()


def test_a_call_that_does_less_than_asked_is_gone_on_with(tmp_path):
    class Bits(Disk):
        def read(self, file, views, offset):
            return super().read(file, [views[0][:4096]], offset)

        def write(self, file, views, offset):
            return super().write(file, [views[0][:4096]], offset)

    tier = SsdTier(tmp_path, disk=Bits())
    slots = tier.put(0, [0, 1])
    assert tier.read(slots).error is None
    assert tier.host.buffer()[1].tobytes() == payload_of(key_of(0, 1))
    tier.close()


@given(st.lists(st.integers(1, 3), max_size=4), st.lists(st.integers(0, 5), max_size=20), st.booleans())
def test_whole_does_every_byte_once_whatever_each_call_does(lengths, answers, ends):
    pages = [memoryview(bytearray(4096 * length)) for length in lengths]
    wanted = sum(map(len, pages))
    done: list[int] = []
    steps = iter(answers)

    def call(file, views, offset):
        assert offset == 100 + sum(done)
        step = 4096 * next(steps, 1)
        if step == 0 and not ends:
            step = 4096
        done.append(min(step, sum(map(len, views))))
        return done[-1]

    try:
        whole(call, 1, pages, 100)
        assert sum(done) == wanted
    except ShortFile:
        assert done[-1] == 0
        assert sum(done) < wanted


def test_after_failures_in_a_row_the_tier_is_left_alone_and_tried_again_later(tmp_path):
    tier, disk = faulty(tmp_path, failures=3, backoff_s=1.0, most_backoff_s=3.0)
    slots = tier.put(5, [0])
    disk.errors["write"] = errno.EIO
    for chain in range(3):
        assert tier.transport.stats().unavailable == ()
        assert type(write(tier, chain)) is TierUnavailable
    calls = disk.calls
    assert tier.transport.stats().unavailable == ("n.ssd: writes",)
    assert type(write(tier, 3)) is TierUnavailable
    assert disk.calls == calls, "it must not have been asked"
    assert tier.transport.stats().refused == 1
    assert tier.read(slots).error is None, "what is full can still be read"
    for backoff_s in (1, 2, 3, 3):  # it doubles, up to the most
        disk.now_ns += backoff_s * SECOND_NS - 1
        calls = disk.calls
        write(tier, 4)
        assert disk.calls == calls
        disk.now_ns += 1
        write(tier, 4)
        assert disk.calls == calls + 1
    disk.errors.clear()
    disk.now_ns += 3 * SECOND_NS
    assert write(tier, 5) is None
    assert write(tier, 6) is None
    assert tier.transport.stats().unavailable == ()
    assert tier.transport.stats().device_failures == 7
    tier.close()


def test_writes_that_never_become_durable_are_failures_in_a_row(tmp_path):
    tier, disk = faulty(tmp_path, failures=2)
    disk.errors["sync"] = errno.EIO
    write(tier, 0)
    write(tier, 1)
    assert tier.transport.stats().unavailable == ("n.ssd: writes",)
    tier.close()


def test_a_disk_that_is_far_too_slow_stands_aside_though_its_answers_are_right(tmp_path):
    tier, disk = faulty(tmp_path, failures=2, deadline_s=0.5)
    slots = tier.put(0, [0])
    disk.took_ns = SECOND_NS
    assert tier.read(slots).error is None
    assert tier.read(slots).error is None
    error = tier.read(slots).error
    assert type(error) is TierUnavailable
    assert "took 1.0 s" in str(error)
    tier.close()


def test_while_a_disk_hangs_nothing_else_is_asked_and_the_hung_copy_ends_in_the_end(tmp_path):
    reading, go_on = threading.Event(), threading.Event()

    class Hangs(Faulty):
        def read(self, file, views, offset):
            reading.set()
            assert go_on.wait(20)
            return super().read(file, views, offset)

    disk = Hangs()
    tier = SsdTier(tmp_path, disk=disk, now_ns=disk.clock, threads=1, deadline_s=10.0)
    slots = tier.put(0, [0])
    copy = Copy(tier.store.regions(slots), tier.host.regions([0]), checksum=True)

    async def main():
        first = tier.transport.submit([copy])
        assert reading.wait(20)
        disk.now_ns += 11 * SECOND_NS
        [second] = await asyncio.wait_for(tier.transport.submit([copy]).future, 20)
        unavailable = tier.transport.stats().unavailable
        go_on.set()
        return (await asyncio.wait_for(first.future, 20))[0], second, unavailable

    first, second, unavailable = asyncio.run(main())
    assert type(second.error) is TierUnavailable
    assert "no answer for 11.0 s" in str(second.error)
    assert unavailable == ("n.ssd: reads",)
    assert first.error is None
    assert tier.read(slots).error is None
    tier.close()


def test_what_was_queued_when_the_disk_failed_is_refused_without_asking_it(tmp_path):
    writing, go_on = threading.Event(), threading.Event()

    class Breaks(Faulty):
        def write(self, file, views, offset):
            writing.set()
            assert go_on.wait(20)
            return super().write(file, views, offset)

    disk = Breaks()
    tier = SsdTier(tmp_path, disk=disk, now_ns=disk.clock, threads=1, failures=2)
    disk.errors["write"] = errno.EIO

    async def main():
        handles = [tier.transport.submit([tier.staged(chain, [0], chain)]) for chain in range(8)]
        assert writing.wait(20)
        go_on.set()
        return [await asyncio.wait_for(handle.future, 20) for handle in handles]

    results = asyncio.run(main())
    assert all(type(result.error) is TierUnavailable for [result] in results)
    assert disk.calls == 2
    tier.close()


def test_the_engine_hands_the_typed_error_to_whoever_asked(tmp_path):
    tier, disk = faulty(tmp_path)
    disk.errors["write"] = errno.ENOSPC
    engine = TransferEngine([tier.transport], NullRecorder(), attempts=2)
    copy = tier.staged(0, [0])
    with pytest.raises(TierUnavailable, match="No space left"):
        asyncio.run(engine.move(copy))
    tier.store.free(copy.target.slots)
    tier.store.check_integrity()
    tier.store.check_idle()
    tier.close()


def test_health_by_itself():
    health = Health(2, deadline_ns=100, backoff_ns=10, most_backoff_ns=15)
    late = health.begin(0)
    assert health.refuses(100) == ""
    assert "no answer" in health.refuses(101)
    health.end(late, 101)
    assert health.refuses(101) == ""
    health.end(health.begin(101), 102, "broken")
    assert health.refuses(111) == "broken"
    assert health.refuses(112) == "", "one may try"
    assert health.refuses(112) == "broken", "and only one"
    assert not health.available(112)
    health.end(health.begin(112), 113)
    assert health.available(113)
    assert health.failures == 2


def test_counts_that_cannot_be_are_config_errors():
    with pytest.raises(ConfigError, match=r"file\.threads=0"):
        FileTransport(threads=0)
    with pytest.raises(ConfigError, match=r"file\.failures=0"):
        FileTransport(failures=0)
