from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from mcjax.errors import ConfigError
from mcjax.kvpool.stores.dram import DramStore
from mcjax.types import Tier


@pytest.mark.parametrize("block_bytes", [1, 64, 100, 4096])
def test_slots_are_aligned_contiguous_and_apart(block_bytes):
    store = DramStore("n", 5, block_bytes)
    blocks = store.buffer()
    assert (store.tier, blocks.shape, blocks.dtype) == (Tier.DRAM, (5, block_bytes), np.uint8)
    for slot in range(5):
        assert blocks[slot].ctypes.data % 64 == 0
        assert blocks[slot].flags.c_contiguous
        blocks[slot] = slot
    assert [set(block.tolist()) for block in blocks] == [{slot} for slot in range(5)]


def test_poison_overwrites_what_is_freed_and_only_that():
    store = DramStore("n", 4, 64, poison=True)
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
    store = DramStore("n", 2, 8)
    slots = store.reserve(1)
    store.buffer()[slots[0]] = 9
    store.free(slots)
    assert (store.buffer()[slots[0]] == 9).all()


def test_memory_that_is_not_there_is_a_config_error():
    with pytest.raises(ConfigError, match="pool_blocks"):
        DramStore("n", 2**20, 2**35)


def test_it_needs_no_jax():
    code = (
        "import sys, mcjax.kvpool.stores.dram, mcjax.transfer.transports.local, mcjax.backends.progress;"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
