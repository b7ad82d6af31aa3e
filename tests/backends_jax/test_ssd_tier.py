"""The real world's SSD tier: folders by node, what a run finds in them, and the same for its replay."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from mcjax.backends.base import Tiers
from mcjax.backends.jax.ssd_tier import SsdTier
from mcjax.backends.replay.world import Log, ReplayWorld
from mcjax.cost.padded import Padded
from mcjax.errors import ConfigError, RunError, StoreError
from mcjax.kvpool.encodings.none import AsComputed
from mcjax.kvpool.keys import KeyTable, keys_from_tokens
from mcjax.kvpool.stores.host import HostStore
from mcjax.transfer.base import Copy
from mcjax.transfer.engine import TransferEngine
from mcjax.types import KVFormat, KVGroup, NullRecorder

KV_FORMAT = KVFormat("model-of-a-test", 4, (KVGroup(bytes_per_token=25),))
SSD_BYTES = 1 << 16
PACKER = AsComputed(KV_FORMAT.block_bytes)


class Outcomes(NullRecorder):
    """Keeps what a log would."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, int, dict]] = []

    def outcome(self, time_ns, mechanism, call, payload) -> None:
        self.rows.append((time_ns, mechanism, call, payload))


def tier(path: Path, recorder: Outcomes, table: KeyTable, kv_format: KVFormat = KV_FORMAT) -> SsdTier:
    return SsdTier(Tiers(ssd_bytes=SSD_BYTES, ssd_path=path), kv_format, table, recorder, PACKER)


def filled(path: Path) -> list[bytes]:
    """Three blocks of one chain, written by a run in a folder of node `n`; returns their keys."""
    table = KeyTable()
    keys = keys_from_tokens(b"space", np.arange(12, dtype=np.int32), 4)
    blocks = table.intern(keys, b"space")
    made = tier(path, Outcomes(), table)
    store = made.store("n")
    assert store is not None
    assert store.capacity == 8
    host = HostStore("n", 3, KV_FORMAT.block_bytes)
    for row, value in zip(host.buffer(), (1, 2, 3), strict=True):
        row[:] = value

    async def write() -> None:
        engine = TransferEngine(made.transports, NullRecorder())
        engine.register(store)
        engine.register(host)
        slots = store.reserve(3)
        store.stage(slots, blocks, (b"",) * 3, None)
        sums = await engine.move(Copy(host.regions([0, 1, 2]), store.regions(slots), checksum=True))
        store.commit(slots, blocks, sums)

    asyncio.run(write())
    made.close()
    return keys


def test_no_tier_makes_nothing(tmp_path: Path) -> None:
    made = SsdTier(Tiers(), KV_FORMAT, KeyTable(), Outcomes(), PACKER)
    made.open(["n"])
    assert made.blocks == 0
    assert made.store("n") is None
    assert made.transports == []
    assert made.figures() is None
    made.close()


def test_what_the_disk_did_is_told(tmp_path: Path) -> None:
    filled(tmp_path)
    with open(tmp_path / "n" / "slab-00000", "r+b") as file:
        file.write(b"x")
    made = tier(tmp_path, Outcomes(), KeyTable())
    made.open(["n"])
    made.close()
    assert made.figures() == {
        "damaged_headers": 1,
        "device_failures": 0,
        "refused": 0,
        "syncs": 0,
        "unavailable": [],
    }


def test_a_tier_too_small_for_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kvpool\.ssd_bytes=5000: has no room for one block of 100 bytes"):
        SsdTier(Tiers(ssd_bytes=5000, ssd_path=tmp_path), KV_FORMAT, KeyTable(), Outcomes(), PACKER)


def test_another_run_finds_the_blocks_and_logs_them(tmp_path: Path) -> None:
    keys = filled(tmp_path)
    table, log = KeyTable(), Outcomes()
    made = tier(tmp_path, log, table)
    made.open(["n", "other"])
    ((_, name, call, payload), (_, empty, _, nothing)) = log.rows
    assert (name, call, empty) == ("ssd.n", 0, "ssd.other")
    assert payload["keys"] == [key.hex() for key in keys]
    assert payload["parents"] == [None, 0, 1]
    assert nothing["keys"] == []
    store = made.store("n")
    assert store is not None
    found = store.recovered()
    assert [table.key(stored.block) for stored in found] == keys
    assert [stored.parent for stored in found] == [None, found[0].block, found[1].block]
    assert store.recovered() == ()
    made.close()


def test_a_replay_begins_with_the_same(tmp_path: Path) -> None:
    filled(tmp_path)
    log = Outcomes()
    made = tier(tmp_path, log, KeyTable())
    made.open(["n"])
    real = made.store("n")
    assert real is not None
    world = replayed(log.rows, real.capacity)
    store = world.ssd_store("n")
    assert store is not None
    assert store.block_bytes == real.block_bytes
    assert list(store.recovered()) == list(real.recovered()) != []
    assert [store.header(slot) for slot in range(8)] == [real.header(slot) for slot in range(8)]
    assert store.reserve(5) == real.reserve(5), "the same slots, so the same ever after"
    assert store is world.ssd_store("n")
    assert [transport.name for transport in world.transports()] == ["device", "local", "mesh", "file"]
    made.close()


def test_a_log_without_the_folder_is_none_of_this_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no 'ssd\.n'"):
        replayed([], 8).ssd_store("n")


def replayed(rows: list[tuple[int, str, int, dict]], blocks: int) -> ReplayWorld:
    """The world that replays a run whose log holds `rows`, of a tier with `blocks` slots."""
    shape = {
        "fingerprint": KV_FORMAT.fingerprint,
        "bytes_per_token": 25,
        "page_tokens": 4,
        "pages": 4,
        "pool_blocks": 4,
        "ssd_blocks": blocks,
        "max_batch": 1,
        "chunk_tokens": 4,
        "max_context_tokens": 16,
        "shares_decoded": False,
    }
    settings = {
        "world": shape,
        "calibration": asdict(Padded("test", 4, 1, 1, 1, 1, 1)),
        "link": {"bytes_per_s": 1e9, "latency_s": 1e-6},
    }
    settled = [(0, name, 0, payload) for name, payload in settings.items()]
    log = Log([(time_ns, name, call, json.dumps(payload)) for time_ns, name, call, payload in [*settled, *rows]])
    return ReplayWorld(log, NullRecorder(), KeyTable())


def test_two_runs_cannot_have_one_folder(tmp_path: Path) -> None:
    first = tier(tmp_path, Outcomes(), KeyTable())
    first.open(["n"])
    with pytest.raises(StoreError, match="in use by process"):
        tier(tmp_path, Outcomes(), KeyTable()).open(["n"])
    first.close()


def test_a_folder_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    filled(tmp_path)
    other = KVFormat("another-model", 4, KV_FORMAT.groups)
    with pytest.raises(StoreError, match="model is model-of-a-test, not another-model"):
        tier(tmp_path, Outcomes(), KeyTable(), other).open(["n"])
