"""`mcjax pool`: what it tells of a tier whose every block is known, and that it changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import xxhash
from conftest_app import ROOT, Answer

from mcjax.app.pool import folders
from mcjax.app.pool.command import command
from mcjax.app.pool.contents import chains_of
from mcjax.kvpool.keys import SALTS_FILE_VARIABLE, Salts, keys_from_tokens, namespace
from mcjax.kvpool.stores.ssd.files import allocate
from mcjax.kvpool.stores.ssd.header import BlockHeader, encode, space_digest
from mcjax.kvpool.stores.ssd.lock import FolderLock
from mcjax.kvpool.stores.ssd.manifest import Manifest
from mcjax.kvpool.stores.ssd.reader import open_folder
from mcjax.types import BlockKey, KVFormat, KVGroup

KV_FORMAT = KVFormat("model-of-a-test", 4, (KVGroup(bytes_per_token=25),))
BLOCK_BYTES, CAPACITY, SLAB_SLOTS = 100, 20, 8

Tell = Callable[..., Answer]

WRITER = """
import asyncio, sys
from pathlib import Path
import numpy as np
from mcjax.kvpool.keys import KeyTable
from mcjax.kvpool.stores.host import HostStore
from mcjax.kvpool.stores.ssd.store import SsdStore
from mcjax.transfer.base import Copy
from mcjax.transfer.engine import TransferEngine
from mcjax.transfer.transports.file import FileTransport
from mcjax.types import KVFormat, KVGroup, NullRecorder

NBYTES, CAPACITY, RUN = 65536, 24, 8
table = KeyTable()
store = SsdStore("d0", Path(sys.argv[1]), CAPACITY, NBYTES, KVFormat("m", 1, (KVGroup(bytes_per_token=NBYTES),)), table)
host = HostStore("d0", RUN, NBYTES)
file = FileTransport()
engine = TransferEngine([file], NullRecorder())
engine.register(store)
engine.register(host)

async def write():
    held, number = [], 0
    while number < 100_000:
        host.buffer()[:] = np.random.default_rng(number).integers(0, 256, (RUN, NBYTES), np.uint8)
        if store.free_slots < RUN:
            store.free(held.pop(0))
        slots = store.reserve(RUN)
        blocks = table.intern([(number * RUN + each).to_bytes(32, "little") for each in range(RUN)])
        store.stage(slots, blocks, (b"",) * RUN, None)
        sums = await engine.move(Copy(host.regions(range(RUN)), store.regions(slots), checksum=True))
        store.commit(slots, blocks, sums)
        held.append(slots)
        number += 1
        if number == 4:
            print("full", flush=True)

asyncio.run(write())
"""
"""Fills a folder, and then writes over what it wrote, for as long as it is let."""


class Folder:
    """One node's folder, written slot by slot."""

    def __init__(self, path: Path):
        path.mkdir(parents=True)
        self.path = path
        self.manifest = Manifest(KV_FORMAT, "none", False, BLOCK_BYTES, CAPACITY, SLAB_SLOTS)
        allocate(path, self.manifest)
        self.manifest.write(path)
        self._written = 0

    def put(self, slot: int, key: BlockKey, parent: BlockKey | None, space: bytes = b"") -> None:
        payload = bytes([slot]) * BLOCK_BYTES
        header = BlockHeader(
            slot,
            self._written,
            key,
            parent,
            space_digest(space),
            self.manifest.layout,
            KV_FORMAT.block_tokens,
            BLOCK_BYTES,
            xxhash.xxh3_128(payload).digest(),
        )
        self._written += 1
        self.poke(slot, 0, encode(header) + payload)

    def chain(self, slots: Sequence[int], keys: Sequence[BlockKey], space: bytes = b"") -> None:
        for at, (slot, key) in enumerate(zip(slots, keys, strict=True)):
            self.put(slot, key, keys[at - 1] if at else None, space)

    def poke(self, slot: int, offset: int, data: bytes) -> None:
        slab, number = divmod(slot, SLAB_SLOTS)
        with (self.path / f"slab-{slab:05d}").open("r+b") as file:
            file.seek(number * self.manifest.slot_bytes + offset)
            file.write(data)


def tokens_keys(tenant: str, tokens: Sequence[int], salts: Salts) -> tuple[bytes, list[BlockKey]]:
    import numpy as np

    space = namespace(KV_FORMAT, salts.of(tenant))
    return space, keys_from_tokens(space, np.array(tokens, np.int32), KV_FORMAT.block_tokens)


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Tell:
    def call(*arguments: str | Path) -> Answer:
        capsys.readouterr()
        status = command([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Answer(status, captured.out, captured.err)

    return call


@pytest.fixture
def tier(tmp_path: Path) -> Folder:
    """Two tenants' chains, in a tier with one node: `known` has 5 blocks that part behind the second, `other` has 2."""
    folder = Folder(tmp_path / "tier" / "d0")
    space, long = tokens_keys("known", range(16), Salts())
    _, short = tokens_keys("known", [*range(8), 99, 98, 97, 96], Salts())
    folder.chain([0, 1, 9, 10], long, space)
    folder.put(2, short[2], long[1], space)
    space, keys = tokens_keys("other", range(8), Salts({"other": "a secret"}))
    folder.chain([3, 4], keys, space)
    return folder


def listing(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


def test_inspect_tells_blocks_chains_and_namespaces(tier: Folder, tell: Tell) -> None:
    answer = tell("inspect", tier.path.parent, "--json", "--tenant", "known")
    assert answer.status == 0, answer.err
    (found,) = json.loads(answer.out)
    assert found["path"] == str(tier.path)
    assert (found["slots"], found["blocks"], found["unused_slots"], found["older_copies"]) == (20, 7, 13, 0)
    assert found["bytes"] == 7 * BLOCK_BYTES
    assert found["disk_bytes"] == CAPACITY * 8192
    assert found["chains"] == {
        "roots": 2,
        "leaves": 3,
        "depth_median": 3,
        "depth_longest": 4,
        "branchings": 1,
        "most_children": 2,
        "without_prefix": 0,
    }
    assert [(one["tenant"], one["blocks"]) for one in found["namespaces"]] == [("known", 5), (None, 2)]
    assert found["damage"] == []
    assert found["used_by"] is None


def test_inspect_for_people_from_either_directory(tier: Folder, tell: Tell) -> None:
    below = tell("inspect", tier.path, "--tenant", "known")
    assert below == tell("inspect", tier.path.parent, "--tenant", "known")
    for words in ("model-of-a-test, 4 tokens a block", "7, 0.0 MB", "2 first blocks, 3 last ones", "(tenant known)"):
        assert words in below.out


def test_a_tenant_with_a_salt_is_told_by_name_and_never_the_salt(
    tier: Folder, tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    salts = tmp_path / "salts.json"
    salts.write_text(json.dumps({"other": "a secret", "third": "never there"}))
    monkeypatch.setenv(SALTS_FILE_VARIABLE, str(salts))
    for arguments in (["inspect", tier.path], ["inspect", tier.path, "--json"], ["verify", tier.path]):
        answer = tell(*arguments)
        assert answer.status == 0
        assert "secret" not in answer.out + answer.err
        assert "never there" not in answer.out
    assert "(tenant other)" in tell("inspect", tier.path).out
    monkeypatch.delenv(SALTS_FILE_VARIABLE)
    assert "(tenant other)" not in tell("inspect", tier.path, "--tenant", "other").out, "another salt, so not theirs"


def test_verify_reads_every_block_and_changes_nothing(tier: Folder, tell: Tell) -> None:
    before = listing(tier.path)
    answer = tell("verify", tier.path.parent)
    assert answer.status == 0, answer.err
    assert "7 blocks sound" in answer.out
    assert "nothing damaged" in answer.out
    tell("inspect", tier.path)
    assert listing(tier.path) == before


def test_verify_names_a_flipped_bit_with_its_place(tier: Folder, tell: Tell) -> None:
    tier.poke(9, 4096 + 50, b"\x00")
    answer = tell("verify", tier.path)
    assert answer.status == 1
    key = tokens_keys("known", range(16), Salts())[1][2]
    problem = "its bytes are not those that its header names"
    assert f"slot 9 (slab-00001 at byte 8,192), block {key.hex()[:16]}: {problem}" in answer.out
    assert "6 blocks sound" in answer.out
    assert "1 damaged" in answer.out
    (found,) = json.loads(tell("verify", tier.path, "--json").out)
    place = {"slot": 9, "file": "slab-00001", "offset": 8192}
    assert found["damage"] == [{**place, "block": key.hex(), "problem": problem}]


def test_a_torn_header_is_damage_and_its_chain_is_lost(tier: Folder, tell: Tell) -> None:
    tier.poke(1, 60, b"\xff\xff")
    answer = tell("inspect", tier.path)
    assert answer.status == 0
    assert "3 blocks whose prefix is not there" in answer.out
    assert "slot 1 (slab-00000 at byte 8,192): the header's checksum is wrong" in answer.out
    answer = tell("verify", tier.path)
    assert answer.status == 1
    assert "slot 1 (slab-00000 at byte 8,192): the header's checksum is wrong" in answer.out


def test_a_block_that_is_there_twice_counts_once(tier: Folder, tell: Tell) -> None:
    space, keys = tokens_keys("known", range(16), Salts())
    tier.put(15, keys[3], keys[2], space)
    (found,) = json.loads(tell("inspect", tier.path, "--json").out)
    assert (found["blocks"], found["older_copies"], found["unused_slots"]) == (7, 1, 12)


def test_a_ring_of_wrong_parents_is_no_endless_walk() -> None:
    def header(key: bytes, parent: bytes | None) -> BlockHeader:
        return BlockHeader(0, 0, key, parent, b"", b"", 1, 1, b"")

    ring = {key: header(key, parent) for key, parent in ((b"a", b"b"), (b"b", b"a"), (b"c", None), (b"d", b"c"))}
    found = chains_of(ring)
    assert (found.roots, found.leaves, found.without_prefix, list(found.depths)) == (1, 1, 2, [2])


def test_what_is_no_tier_is_named(tmp_path: Path, tell: Tell) -> None:
    for path, words in ((tmp_path / "absent", "no such directory"), (tmp_path, "holds no SSD tier")):
        answer = tell("inspect", path)
        assert answer.status == 2
        assert words in answer.err
        assert str(path) in answer.err


def test_a_slot_under_the_pen_is_looked_at_again(tier: Folder, tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a run has the folder, only what stays damaged is damage."""
    monkeypatch.setattr(folders, "FIRST_PAUSE_S", 0.0)
    answers = {3: iter([False, False, True]), 4: iter([True]), 5: iter([False] * 9)}
    looks: list[int] = []

    def look(slot: int) -> tuple[int, bool]:
        looks.append(slot)
        return slot, next(answers[slot])

    assert folders.settle([3, 4, 5], look, lambda one: one[1]) == [(3, True), (4, True), (5, False)]
    assert [looks.count(slot) for slot in (3, 4, 5)] == [3, 1, folders.LOOKS]
    lock = FolderLock(tier.path)
    try:
        assert "in use by process" in tell("inspect", tier.path).out
        assert tell("verify", tier.path).status == 0
        tier.poke(9, 4096, b"\x00")
        assert tell("verify", tier.path).status == 1
    finally:
        lock.close()


@pytest.mark.check_long
def test_both_are_safe_while_another_process_writes(tmp_path: Path, tell: Tell) -> None:
    """Every slot is written over many times meanwhile; none of it is damage."""
    folder = tmp_path / "d0"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], env=environment, stdout=subprocess.PIPE, text=True
    ) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "full\n"
            sequences: list[int] = []
            for _ in range(12):
                answer = tell("verify", folder, "--json")
                assert answer.status == 0, answer.out
                (found,) = json.loads(answer.out)
                assert found["used_by"]
                assert found["sound"] + found["changed"] > 0
                answer = tell("inspect", folder, "--json")
                (seen,) = json.loads(answer.out)
                assert seen["damage"] == []
                with open_folder(folder) as reader:
                    sequences.append(max(one.header.sequence for one in reader.headers() if one.header is not None))
            assert writer.poll() is None, "it wrote all the while"
            assert sequences[-1] > sequences[0] + 24, "and over everything"
        finally:
            writer.kill()
