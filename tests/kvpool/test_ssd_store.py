"""What an SSD folder keeps from process to process, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcjax.errors import ConfigError, PoolFull, StoreError
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.keys import KeyTable
from mcjax.kvpool.pool import Pool
from mcjax.kvpool.stores.ssd.header import HEADER_BYTES, decode, encode, space_digest
from mcjax.kvpool.stores.ssd.lock import FolderLock, holder
from mcjax.kvpool.stores.ssd.reader import open_folder
from mcjax.kvpool.stores.ssd.store import SsdStore, fitting_slots
from mcjax.kvpool.watermark.static import Static
from mcjax.types import KVGroup, NullRecorder
from ssd_fixtures import BLOCK_BYTES, FORMAT, SPACE, SsdTier, key_of, payload_of

SLOT_BYTES = HEADER_BYTES + 8192


def keys_of(tier: SsdTier) -> list[bytes]:
    return [tier.table.key(one.block) for one in tier.store.recovered()]


@pytest.mark.parametrize("block_bytes", [1, BLOCK_BYTES, 8192])
def test_bytes_names_and_order_survive_reopening(tmp_path, block_bytes):
    tier = SsdTier(tmp_path, block_bytes=block_bytes)
    tier.put(0, [0, 1, 2])
    tier.put(1, [0])
    tier.put(0, [3])
    tier.close()
    tier = SsdTier(tmp_path, block_bytes=block_bytes)
    found = tier.store.recovered()
    keys = [tier.table.key(one.block) for one in found]
    assert keys == [key_of(0, 0), key_of(0, 1), key_of(0, 2), key_of(1, 0), key_of(0, 3)]
    parents = [None if one.parent is None else tier.table.key(one.parent) for one in found]
    assert parents == [None, key_of(0, 0), key_of(0, 1), None, key_of(0, 2)]
    assert tier.store.recovered() == []  # they were handed out
    assert (tier.store.free_slots, tier.store.taken_slots) == (3, 5)
    for one, key in zip(found, keys, strict=True):
        assert tier.read([one.slot]).checksums == (one.checksum,)
        assert tier.host.buffer()[0].tobytes() == payload_of(key, block_bytes)
        assert tier.checksum(one.slot) == one.checksum
    tier.store.check_integrity()
    tier.close()


def test_a_pool_takes_over_what_it_finds_and_frees_the_rest(tmp_path):
    tier = SsdTier(tmp_path)
    tier.put(0, [0, 1, 2])
    tier.put(1, [1, 2])  # its first block is not there
    tier.close()
    tier = SsdTier(tmp_path)
    told = []
    pool = Pool(
        "n", tier.store, LRU(), Static(1, 1), NullRecorder(), 1, lambda sign, blocks: told.append((sign, blocks))
    )
    chain = tier.blocks(0, [0, 1, 2])
    assert pool.match(chain) == 3
    assert pool.match(tier.blocks(1, [1, 2])) == 0
    assert told == [(1, chain)]
    assert tier.store.free_slots == 5
    pool.check_integrity()
    tier.close()


def test_of_two_copies_of_a_block_the_later_one_counts(tmp_path):
    tier = SsdTier(tmp_path)
    first = tier.put(0, [0])
    second = tier.put(0, [0])
    assert first != second
    tier.close()
    tier = SsdTier(tmp_path)
    assert [one.slot for one in tier.store.recovered()] == second
    assert tier.store.free_slots == 7
    tier.close()


def test_sequence_numbers_go_on_where_the_last_process_ended(tmp_path):
    slots = []
    for _ in range(3):  # always the same block, each time in another process
        tier = SsdTier(tmp_path)
        before = [one.slot for one in tier.store.recovered()]
        assert before == slots
        slots = tier.put(0, [0])
        assert before != slots
        tier.close()


def test_a_freed_slot_is_found_again_until_another_block_lies_there(tmp_path):
    tier = SsdTier(tmp_path, capacity=2)
    tier.store.free(tier.put(0, [0, 1]))
    tier.close()
    tier = SsdTier(tmp_path, capacity=2)
    assert keys_of(tier) == [key_of(0, 0), key_of(0, 1)]
    tier.store.free([0, 1])
    tier.put(1, [0, 1])
    tier.close()
    tier = SsdTier(tmp_path, capacity=2)
    assert keys_of(tier) == [key_of(1, 0), key_of(1, 1)]
    tier.close()


def test_nothing_that_was_only_staged_is_found(tmp_path):
    tier = SsdTier(tmp_path)
    tier.staged(0, [0, 1])
    tier.close()
    tier = SsdTier(tmp_path)
    assert tier.store.recovered() == []
    assert tier.store.damaged == 0
    tier.close()


def test_growing_keeps_all_and_shrinking_loses_only_the_slots_at_the_end(tmp_path):
    tier = SsdTier(tmp_path, capacity=6)
    tier.put(0, [0, 1, 2, 3, 4, 5])
    tier.close()
    tier = SsdTier(tmp_path, capacity=11)  # more in the last slab, and two slabs more
    assert len(tier.store.recovered()) == 6
    assert tier.store.free_slots == 5
    assert sum(path.stat().st_size for path in tmp_path.glob("slab-*")) == 11 * SLOT_BYTES
    tier.put(1, [0, 1, 2, 3, 4])
    tier.close()
    tier = SsdTier(tmp_path, capacity=5)
    left = tier.store.recovered()
    assert {one.slot for one in left} <= set(range(5))
    assert all(tier.read([one.slot]).checksums == (one.checksum,) for one in left)
    assert sum(path.stat().st_size for path in tmp_path.glob("slab-*")) == 5 * SLOT_BYTES
    tier.close()
    tier = SsdTier(tmp_path, capacity=11)  # what was beyond does not come back
    assert len(tier.store.recovered()) == len(left)
    tier.close()


def test_a_slab_that_is_gone_is_made_again_and_its_blocks_are_lost(tmp_path):
    tier = SsdTier(tmp_path)
    tier.put(0, range(8))
    tier.close()
    (tmp_path / "slab-00001").unlink()
    tier = SsdTier(tmp_path)
    assert all(one.slot < 4 for one in tier.store.recovered())
    assert (tmp_path / "slab-00001").stat().st_size == 4 * SLOT_BYTES
    tier.close()


def open_with(folder: Path, **changes: object) -> SsdStore:
    options = {"capacity": 8, "block_bytes": BLOCK_BYTES, "kv_format": FORMAT, "encoding": "none", **changes}
    return SsdStore("n", folder, table=KeyTable(), **options)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_format": dataclasses.replace(FORMAT, fingerprint="other-model")}, "model is tiny-model, not other-model"),
        ({"kv_format": dataclasses.replace(FORMAT, block_tokens=8)}, "tokens of a block is 4, not 8"),
        (
            {"kv_format": dataclasses.replace(FORMAT, groups=(KVGroup("swa", "window", 1250),))},
            r"KV groups is full .*, not swa",
        ),
        ({"encoding": "int8"}, "encoding is none, not int8"),
        ({"lossy": True}, r"encoding is none, not none \(lossy\)"),
        ({"block_bytes": 4096}, "bytes of a block is 5000, not 4096"),
    ],
)
def test_a_folder_of_other_blocks_is_refused_by_name(tmp_path, changes, named):
    open_with(tmp_path).close()
    before = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    with pytest.raises(StoreError, match=named) as refused:
        open_with(tmp_path, **changes)
    assert str(tmp_path) in str(refused.value)
    assert "kvpool.ssd_path" in str(refused.value)
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == before
    open_with(tmp_path).close()  # the refused one has let go of the lock


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "damaged: it is no JSON"),
        ("[1]", "it is not that of an SSD tier"),
        ('{"kind": "mcjax ssd tier", "version": 1}', "'fingerprint' is missing"),
        ('{"kind": "mcjax ssd tier", "version": 99}', "format version 99, this mcjax reads and writes 1"),
    ],
)
def test_a_manifest_that_cannot_be_understood_is_refused(tmp_path, text, named):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match=named):
        open_with(tmp_path)
    with pytest.raises(StoreError, match=named):
        open_folder(tmp_path)


def test_without_its_manifest_a_folder_still_serves_only_its_own_layout(tmp_path):
    tier = SsdTier(tmp_path)
    tier.put(0, [0, 1])
    tier.close()
    (tmp_path / "manifest.json").unlink()
    other = SsdTier(tmp_path, kv_format=dataclasses.replace(FORMAT, fingerprint="other-model"))
    assert other.store.recovered() == []
    assert other.store.free_slots == 8
    other.close()


def test_sizes_that_cannot_be_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"kvpool\.ssd_bytes"):
        open_with(tmp_path, capacity=0)
    with pytest.raises(ConfigError, match="block_bytes"):
        open_with(tmp_path, block_bytes=0)
    with pytest.raises(StoreError, match="cannot be written to"):
        open_with(Path(os.devnull) / "below")


def test_a_disk_without_room_is_refused_and_left_as_it_was(tmp_path, monkeypatch):
    def full(descriptor, offset, length):
        if offset + length > 4 * SLOT_BYTES // 2:
            raise OSError(28, "No space left on device")
        os.ftruncate(descriptor, offset + length)

    tier = SsdTier(tmp_path, capacity=2)
    tier.put(0, [0, 1])
    tier.close()
    before = {path.name: path.read_bytes() for path in tmp_path.glob("slab-*")}
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(StoreError, match=r"no room for .* bytes.*No space left.*lower kvpool.ssd_bytes"):
        SsdTier(tmp_path, capacity=8)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("slab-*")} == before
    tier = SsdTier(tmp_path, capacity=2)
    assert len(tier.store.recovered()) == 2
    tier.close()


def test_one_process_writes_and_others_are_refused_by_name(tmp_path):
    open_with(tmp_path / "a").close()
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from mcjax.kvpool.stores.ssd.lock import FolderLock;"
            "lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()",
            str(tmp_path / "a"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    try:
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(StoreError, match=rf"in use by process {child.pid} on .*kvpool.ssd_path"):
            open_with(tmp_path / "a")
        with open_folder(tmp_path / "a") as reader:
            assert str(child.pid) in reader.used_by
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    open_with(tmp_path / "a").close()  # however it ended, its lock is gone
    assert holder(tmp_path / "a") == ""


def test_looking_who_holds_the_lock_keeps_nobody_from_taking_it(tmp_path):
    """A reader's glance is a shared lock for an instant; here it is there at each of the writer's first tries."""
    import fcntl

    held = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_SH)
    real, tries = os.sched_yield, []

    def the_reader_goes_on():
        tries.append(real())
        if len(tries) == 5:
            os.close(held)

    try:
        os.sched_yield = the_reader_goes_on
        lock = FolderLock(tmp_path)
    finally:
        os.sched_yield = real
    assert len(tries) == 5
    assert str(os.getpid()) in holder(tmp_path)
    lock.close()


def test_reserving_more_than_there_is_takes_nothing(tmp_path):
    tier = SsdTier(tmp_path, capacity=3)
    with pytest.raises(PoolFull):
        tier.store.reserve(4)
    assert tier.store.free_slots == 3
    tier.close()


def test_a_header_is_whole_or_none(tmp_path):
    tier = SsdTier(tmp_path)
    [slot] = tier.put(2, [5])
    [place] = [found for found in open_folder(tmp_path).headers() if found.header]
    header = place.header
    assert header is not None
    assert (header.slot, header.key, header.parent) == (slot, key_of(2, 5), key_of(2, 4))
    assert (header.namespace, header.tokens, header.payload_bytes) == (space_digest(SPACE), 4, BLOCK_BYTES)
    assert (header.encoding, header.lossy) == ("none", False)
    sector = encode(header)
    assert len(sector) == HEADER_BYTES
    assert decode(sector, slot) == (header, "")
    for at in [*range(260), 2000, *range(HEADER_BYTES - 20, HEADER_BYTES)]:
        flipped = bytearray(sector)
        flipped[at] ^= 1
        found, damage = decode(bytes(flipped), slot)
        assert found is None, at
        assert damage
    assert decode(sector, slot + 1) == (None, f"the header is that of slot {slot}")
    assert decode(sector[:512].ljust(HEADER_BYTES, b"\x00"), slot)[0] is None
    assert decode(bytes(HEADER_BYTES), slot) == (None, "")
    tier.close()


def test_the_manifest_says_whose_blocks_these_are(tmp_path):
    open_with(tmp_path, capacity=5).close()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["fingerprint"] == "tiny-model"
    assert (manifest["block_bytes"], manifest["slot_bytes"], manifest["capacity"]) == (BLOCK_BYTES, SLOT_BYTES, 5)
    assert manifest["slabs"] == ["slab-00000"]
    assert fitting_slots(5 * SLOT_BYTES + 100, BLOCK_BYTES) == 5


def test_a_reader_tells_blocks_damage_and_nothing_apart(tmp_path):
    tier = SsdTier(tmp_path)
    slots = tier.put(0, [0, 1, 2])
    with open(tmp_path / "slab-00000", "r+b") as file:
        file.seek(slots[0] * SLOT_BYTES + 100)
        file.write(b"\xff")
        file.seek(slots[1] * SLOT_BYTES + HEADER_BYTES + 100)
        file.write(b"\xff\xff")
    with open_folder(tmp_path) as reader:
        found = {one.slot: one for one in reader.headers()}
        assert len(found) == 8
        assert found[slots[0]].damage == "the header's checksum is wrong"
        assert reader.verify(found[slots[1]]) == "damaged"
        assert reader.verify(found[slots[2]]) == "sound"
        assert bytes(reader.read_payload(slots[2])) == payload_of(key_of(0, 2))
        assert sum(one.header is None and not one.damage for one in found.values()) == 5
        tier.store.free([slots[2]])
        tier.put(1, [0])
        assert reader.verify(found[slots[2]]) == "changed"
    tier.close()
    with pytest.raises(StoreError, match="holds no SSD tier"):
        open_folder(tmp_path / "elsewhere")
