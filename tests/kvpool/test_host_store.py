from __future__ import annotations

import gc
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from mcjax.errors import ConfigError
from mcjax.kvpool.stores.host import HostStore
from mcjax.types import Tier


@pytest.mark.parametrize("block_bytes", [1, 64, 100, 4096])
def test_slots_are_aligned_contiguous_and_apart(block_bytes):
    store = HostStore("n", 5, block_bytes)
    blocks = store.buffer()
    assert (store.tier, blocks.shape, blocks.dtype) == (Tier.DRAM, (5, block_bytes), np.uint8)
    for slot in range(5):
        assert blocks[slot].ctypes.data % 64 == 0
        assert blocks[slot].flags.c_contiguous
        blocks[slot] = slot
    assert [set(block.tolist()) for block in blocks] == [{slot} for slot in range(5)]


def test_poison_overwrites_what_is_freed_and_only_that():
    store = HostStore("n", 4, 64, poison=True)
    slots = store.reserve(3)
    region = store.regions(slots)
    store.buffer()[:] = 7
    store.free(iter(slots[:2]))
    floats = store.buffer().view(np.float32)
    assert np.isnan(floats[slots[:2]]).all()
    assert not np.isnan(floats[slots[2]]).any()
    assert not region.is_current()
    store.check_integrity()


def test_without_poison_bytes_stay():
    store = HostStore("n", 2, 8)
    slots = store.reserve(1)
    store.buffer()[slots[0]] = 9
    store.free(slots)
    assert (store.buffer()[slots[0]] == 9).all()


def test_memory_that_is_not_there_is_a_config_error():
    with pytest.raises(ConfigError, match="pool_blocks"):
        HostStore("n", 2**20, 2**35)


def test_nothing_is_allocated_for_a_block_once_every_slot_has_been_used():
    store = HostStore("n", 64, 4096)

    def turn():
        slots = store.reserve(64)
        store.commit(slots, range(64), [b""] * 64)
        region = store.regions(slots)
        store.hold(region)
        store.buffer()[slots[0]] = store.buffer()[slots[1]]
        store.let_go(region)
        store.free(slots)

    for _ in range(3):
        turn()
    gc.collect()
    tracemalloc.start()
    try:
        turn()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(20):
            turn()
        after, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 4096, "20 turns of 64 blocks each leave less than one block"
    assert most - before < 64 * 512, "and take some words a block for the time being, never its bytes"


def test_it_needs_no_jax():
    code = (
        "import sys, mcjax.kvpool.stores.host, mcjax.transfer.transports.local, mcjax.backends.progress;"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
