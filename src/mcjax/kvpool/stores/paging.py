"""What kind of pages a mapping has, on which NUMA node, and that all are there. Not on Linux: only the last."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mcjax.errors import ConfigError

PAGE_BYTES = 4096
"""Slots of at least so many bytes begin at a multiple of it, as a disk that is read without the page cache wants."""

HUGE_PAGE_BYTES = 2 << 20
CHUNK_BYTES = 32 << 20
"""Touched by one call, so that threads share the work evenly and an interrupt is heard."""

MOST_THREADS = 8

ORDINARY = "ordinary pages"

_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
_MPOL_BIND = 2
_MBIND = {"x86_64": 237, "aarch64": 235, "riscv64": 235}
"""The number of the system call, which the C library does not wrap."""
_NUMA = Path("/sys/devices/system/node")


def free_huge_pages() -> int:
    """Reserved ones (`vm.nr_hugepages`) that nobody has taken."""
    try:
        count = Path(f"/sys/kernel/mm/hugepages/hugepages-{HUGE_PAGE_BYTES >> 10}kB/free_hugepages").read_text()
    except OSError:
        return 0
    return int(count)


def known_node(node: int | None) -> int | None:
    """`node`, or None where the system knows of no nodes. Raises `ConfigError` if it knows of others only."""
    if node is None or not _NUMA.is_dir():
        return None
    nodes = sorted(int(path.name[4:]) for path in _NUMA.glob("node[0-9]*"))
    if node not in nodes:
        raise ConfigError("kvpool.numa_node", node, "this machine has no such NUMA node", nodes)
    return node


def bind(address: int, nbytes: int, node: int) -> None:
    """Let the pages of a mapping come from one node. Raises `ConfigError` if the system will not."""
    number = _MBIND.get(platform.machine())
    if number is None:
        problem = f"how memory is bound to a node is not known on {platform.machine()}"
        raise ConfigError("kvpool.numa_node", node, problem, ["null"])
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_int(_MPOL_BIND), words)
    if call(ctypes.c_long(number), *arguments, ctypes.c_ulong(len(words) * 64 + 1), ctypes.c_uint(0)) != 0:
        problem = f"the system does not bind memory to it ({os.strerror(ctypes.get_errno())})"
        raise ConfigError("kvpool.numa_node", node, problem, ["null"])


def touch(memory: mmap.mmap, address: int, nbytes: int) -> None:
    """Have every page there, now: a fault in the middle of a copy costs several times the copy."""
    populate = _populate(memory, address)
    starts = list(range(0, nbytes, CHUNK_BYTES))
    workers = min(len(starts), MOST_THREADS, os.cpu_count() or 1)

    def work(first: int) -> None:
        for start in starts[first::workers]:
            populate(start, min(CHUNK_BYTES, nbytes - start))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(1, workers)]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()


def _populate(memory: mmap.mmap, address: int) -> Callable[[int, int], None]:
    def by_hand(start: int, nbytes: int) -> None:
        np.frombuffer(memory, np.uint8, nbytes, start)[::PAGE_BYTES] = 0

    if sys.platform != "linux":
        return by_hand
    advise = ctypes.CDLL(None, use_errno=True).madvise

    def at_once(start: int, nbytes: int) -> None:
        where, size = ctypes.c_void_p(address + start), ctypes.c_size_t(nbytes)
        if advise(where, size, ctypes.c_int(_MADV_POPULATE_WRITE)) != 0:
            by_hand(start, nbytes)  # an older kernel

    return at_once


def pages_got(address: int) -> str:
    """What the system says of the mapping: it may take the advice, or leave it."""
    if sys.platform != "linux":
        return ORDINARY
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE):
        first, _, rest = mapping.partition("-")
        if rest and int(first, 16) <= address < int(rest.split(" ", 1)[0], 16):
            sizes = [
                int(size) for size in re.findall(r"^(?:AnonHugePages|ShmemPmdMapped):\s*(\d+)", rest, re.MULTILINE)
            ]
            return "transparent huge pages" if sum(sizes) else ORDINARY
    return ORDINARY
