"""One piece of memory for a node's blocks: what other processes see of it, what it is made of, that it goes away."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mcjax.errors import ConfigError
from mcjax.kvpool.stores import paging, slab
from mcjax.kvpool.stores.host import HostStore
from mcjax.kvpool.stores.slab import Area, Attached, Slab, area_bytes

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux's")

CHILD = """
import sys
import numpy as np
from mcjax.kvpool.stores.slab import Area, Attached

path, nbytes, offset, capacity, block_bytes = sys.argv[1], *map(int, sys.argv[2:])
blocks = Attached(path, nbytes).blocks(Area(offset, capacity, block_bytes))
assert blocks.shape == (capacity, block_bytes)
assert (blocks[1] == np.arange(block_bytes) % 251).all(), "what the owner wrote"
blocks[2] = blocks[1][::-1]
"""


@linux
def test_another_process_reads_and_writes_the_same_blocks():
    store = HostStore("n", 4, 5000)
    store.buffer()[1] = np.arange(5000) % 251
    area = store.area
    numbers = [store.slab.nbytes, area.offset, area.capacity, area.block_bytes]
    subprocess.run([sys.executable, "-c", CHILD, store.slab.path, *map(str, numbers)], check=True)
    np.testing.assert_array_equal(store.buffer()[2], (np.arange(5000) % 251)[::-1])
    assert not store.buffer()[[0, 3]].any()


@linux
def test_a_descriptor_is_as_good_as_a_path_and_nobody_can_cut_the_memory_short():
    store = HostStore("n", 2, 100)
    there = Attached(store.slab.fd, store.slab.nbytes).blocks(store.area)
    there[1] = 7
    assert (store.buffer()[1] == 7).all()
    with pytest.raises(PermissionError):
        os.ftruncate(store.slab.fd, 0)


def test_size_classes_share_a_slab_and_no_byte():
    sizes = [(3, 10_000), (50, 100), (2, 4096), (7, 1)]
    one = Slab(sum(area_bytes(*size) for size in sizes))
    stores = [HostStore("n", *size, name=f"class{at}", slab=one) for at, size in enumerate(sizes)]
    for at, store in enumerate(stores):
        store.buffer()[:] = at + 1
    for at, (store, (capacity, block_bytes)) in enumerate(zip(stores, sizes, strict=True)):
        assert store.buffer().shape == (capacity, block_bytes)
        assert (store.buffer() == at + 1).all()
    with pytest.raises(ValueError, match="0 left"):
        HostStore("n", 1, 1, name="more", slab=one)


@pytest.mark.parametrize(
    ("block_bytes", "alignment"), [(1, 64), (100, 64), (4095, 64), (4096, 4096), (5000, 4096), (8192, 4096)]
)
def test_slots_are_aligned_for_devices_that_read_and_write_them_in_place(block_bytes, alignment):
    first, second = HostStore("n", 3, 100), HostStore("n", 3, block_bytes)
    for store in (second, HostStore("m", 3, block_bytes, slab=Slab(1 << 20))):
        assert all(block.ctypes.data % alignment == 0 for block in store.buffer())
        assert store.buffer().strides[0] % alignment == 0
        whole = range(store.slab.address, store.slab.address + store.slab.nbytes)
        assert store.slab.address % 4096 == 0
        assert all(block.ctypes.data in whole for block in store.buffer())
    assert first.slab.address != second.slab.address


def descriptors_and_mappings() -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("mcjax-blocks")


@linux
def test_everything_is_given_back():
    gc.collect()
    before = descriptors_and_mappings()
    stores = [HostStore(f"n{at}", 8, 1 << 16) for at in range(5)]
    during = descriptors_and_mappings()
    assert during[1] - before[1] == 5
    assert during[0] > before[0]
    kept = stores[0].buffer()[3]
    kept[:] = 9
    for store in stores:
        store.close()
        store.close()
    after = descriptors_and_mappings()
    assert after[1] - before[1] == 1, "whoever has a view keeps its memory, and no more"
    assert (kept == 9).all()
    del kept
    assert descriptors_and_mappings() == before
    forgotten = HostStore("n", 8, 1 << 16)
    del forgotten
    gc.collect()
    assert descriptors_and_mappings() == before, "one that nobody closed"


def resident_kib(name: str) -> int:
    """Of this process's mapping of that name, as the system counts it."""
    text = Path("/proc/self/smaps").read_text()
    mapping = text[text.index(name) :]
    return int(mapping[mapping.index("Rss:") :].split()[1])


@linux
def test_every_page_is_there_before_anybody_asks(monkeypatch):
    monkeypatch.setattr(paging, "CHUNK_BYTES", 1 << 20)  # several, and several threads
    one = Slab((5 << 20) + 4096, huge_pages="never", name="mcjax-touched")
    assert resident_kib("mcjax-touched") == one.nbytes >> 10
    one.close()


@linux
def test_a_kernel_that_cannot_populate_has_its_pages_touched_by_hand(monkeypatch):
    monkeypatch.setattr(paging, "_MADV_POPULATE_WRITE", 250)  # no such advice
    one = Slab(3 << 20, huge_pages="never", name="mcjax-by-hand")
    assert resident_kib("mcjax-by-hand") == one.nbytes >> 10


def test_huge_pages_are_asked_for_and_what_was_got_is_told(monkeypatch):
    assert Slab(1 << 22, huge_pages="never").pages == paging.ORDINARY
    assert Slab(4096, huge_pages="auto").nbytes == 4096
    auto = Slab((2 << 20) + 1, huge_pages="auto")
    assert auto.nbytes == 4 << 20
    assert auto.pages in ("reserved huge pages", "transparent huge pages", paging.ORDINARY)
    monkeypatch.setattr(slab, "free_huge_pages", lambda: 0)
    monkeypatch.setattr(slab, "pages_got", lambda address: paging.ORDINARY)
    with pytest.raises(ConfigError, match=r"kvpool\.huge_pages=require.*ordinary pages only.*nr_hugepages"):
        Slab(4096, huge_pages="require")
    monkeypatch.setattr(slab, "pages_got", lambda address: "transparent huge pages")
    assert Slab(4096, huge_pages="require").pages == "transparent huge pages"


@linux
def test_reserved_huge_pages_that_turn_out_not_to_be_there_are_done_without(monkeypatch):
    if paging.free_huge_pages():
        pytest.skip("there are some")
    monkeypatch.setattr(slab, "free_huge_pages", lambda: 1000)
    one = Slab(2 << 20, huge_pages="auto")
    one.blocks(one.carve(1, 2 << 20))[:] = 1
    assert one.pages != "reserved huge pages"


GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236, "riscv64": 236}


@linux
@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").is_dir(), reason="the kernel has no NUMA")
@pytest.mark.skipif(platform.machine() not in GET_MEMPOLICY, reason="its system calls are not known here")
def test_memory_is_bound_to_the_node_that_was_named():
    import ctypes

    one = Slab(1 << 20, numa_node=0)
    assert one.numa_node == 0
    mode, mask = ctypes.c_int(), ctypes.c_ulong()
    call = ctypes.CDLL(None, use_errno=True).syscall
    by_address = ctypes.c_ulong(2)
    bits = ctypes.c_ulong(64)
    where = ctypes.c_void_p(one.address)
    number = ctypes.c_long(GET_MEMPOLICY[platform.machine()])
    assert call(number, ctypes.byref(mode), ctypes.byref(mask), bits, where, by_address) == 0
    assert (mode.value, mask.value) == (2, 1), "MPOL_BIND to node 0"


def test_a_node_that_is_not_there_is_named_and_where_there_are_none_nothing_is_bound(monkeypatch, tmp_path):
    (tmp_path / "node0").mkdir()
    (tmp_path / "node3").mkdir()
    monkeypatch.setattr(paging, "_NUMA", tmp_path)
    with pytest.raises(ConfigError, match=r"kvpool\.numa_node=1: this machine has no such NUMA node; allowed: 0, 3"):
        Slab(4096, numa_node=1)
    monkeypatch.setattr(paging, "_NUMA", tmp_path / "gone")
    assert Slab(4096, numa_node=1).numa_node is None


def test_a_system_that_will_not_bind_says_why(monkeypatch, tmp_path):
    (tmp_path / "node63").mkdir()
    monkeypatch.setattr(paging, "_NUMA", tmp_path)
    with pytest.raises(ConfigError, match=r"kvpool\.numa_node=63"):
        Slab(4096, numa_node=63)


def test_areas_follow_one_another_on_whole_pages():
    one = Slab(5 * 4096)
    assert [one.carve(1, 100), one.carve(65, 64), one.carve(1, 4097)] == [
        Area(0, 1, 100),
        Area(4096, 65, 64),
        Area(3 * 4096, 1, 4097),
    ]
    with pytest.raises(ValueError, match="0 left"):
        one.carve(1, 1)
    one.close()
    with pytest.raises(ValueError, match="closed"):
        one.blocks(Area(0, 1, 1))
