"""`peers`: the same batches into and out of Mooncake Store's own segment, in turns with ours.

Both are one process's own host memory, and what is put comes from a registered buffer and goes back to one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_timing import Contestant, interleaved, speedup
from kvpool_way import Way, random_bytes
from measure import BenchmarkError, say

from mcjax.kvpool.stores.host import HostStore
from mcjax.transfer.transports.local import Local

SIZES, BATCH, ROUNDS = (2**16, 2**20, 2**22), 64, 30
START_S = 20.0
HOST = "127.0.0.1"


def run(out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """For each size: bytes a second of put and get of both, and how many times as fast ours is, by round."""
    store_module = _peer()
    batch, rounds = options.batch or BATCH, options.rounds or ROUNDS
    sizes = options.block_bytes or list(SIZES)
    with _master(out) as address:
        store = store_module.MooncakeDistributedStore()
        # Its allocator needs room beside the blocks themselves.
        segment = 2 * batch * max(sizes) + 2**28
        if status := store.setup(HOST, "P2PHANDSHAKE", segment, 2**26, "tcp", "", address):
            raise BenchmarkError(f"Mooncake Store cannot be set up: status {status}")
        try:
            rows = [measured(store, nbytes, batch, rounds) for nbytes in sizes]
        finally:
            store.close()
    return {"batch": batch, "rounds": rounds, "version": _version(), "rows": rows}


def measured(store: Any, block_bytes: int, batch: int, rounds: int) -> dict[str, Any]:
    """One block size; what comes back is compared once, on either side."""
    say(f"peers: {batch} blocks of {block_bytes:,} bytes, {rounds} rounds")
    outside, ours = HostStore("node", batch, block_bytes, "outside"), HostStore("node", batch, block_bytes)
    random_bytes(outside, 0)
    local = Local()
    way = Way(ours, outside, [local], range(1, batch + 1))
    buffer = outside.buffer()
    pointers = [buffer.ctypes.data + row * buffer.strides[0] for row in range(batch)]
    keys, sizes = [f"{block_bytes}-{index}" for index in range(batch)], [block_bytes] * batch
    if status := store.register_buffer(pointers[0], batch * buffer.strides[0]):
        raise BenchmarkError(f"Mooncake Store registers no buffer: status {status}")

    def put() -> None:
        _check("put", store.batch_put_from(keys, pointers, sizes), 0)

    def get() -> None:
        _check("get", store.batch_get_into(keys, pointers, sizes), block_bytes)

    puts = {
        "mcjax put": Contestant(lambda: way.put(False), way.forget),
        "Mooncake put": Contestant(put, lambda: store.remove_all(True)),
    }
    timings = interleaved(puts, rounds)
    way.put(True)
    put()
    expected = buffer.copy()
    for name, fetch in (("ours", lambda: way.get(True)), ("Mooncake's", get)):
        buffer[:] = 0
        fetch()
        if (buffer != expected).any():
            raise BenchmarkError(f"{name}: what came back is not what was put there")
    timings |= interleaved({"mcjax get": Contestant(lambda: way.get(False)), "Mooncake get": Contestant(get)}, rounds)
    store.remove_all(True)
    store.unregister_buffer(pointers[0])
    local.close()
    way.close()
    nbytes = batch * block_bytes
    return {
        "block_bytes": block_bytes,
        "sides": {
            name: {
                "median_bytes_per_s": nbytes / timing.median_s,
                "best_bytes_per_s": nbytes / timing.best_s,
                "ratio": speedup(timing, timings[f"Mooncake {name.split()[1]}"]),
            }
            for name, timing in timings.items()
        },
    }


def _check(what: str, statuses: list[int], expected: int) -> None:
    wrong = [status for status in statuses if status != expected]
    if wrong:
        raise BenchmarkError(f"Mooncake Store: {len(wrong)} of a batch's {what} failed, status {wrong[0]}")


def _peer() -> Any:
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as problem:
        need = "it comes with `pip install 'mcjax[peers]'`, and needs libibverbs1, libnuma1 and libcurl4 of the system"
        raise BenchmarkError(f"Mooncake Store cannot be imported ({problem}); {need}") from None


def _version() -> str:
    from importlib.metadata import version

    return version("mooncake-transfer-engine-non-cuda")


@contextlib.contextmanager
def _master(out: Path) -> Iterator[str]:
    """Mooncake's master on free ports of this machine, for as long as the block lasts; gives its address."""
    program = shutil.which("mooncake_master", path=str(Path(sys.executable).parent)) or shutil.which("mooncake_master")
    if program is None:
        raise BenchmarkError("mooncake_master is not beside this Python")
    port, metrics = _free_port(), _free_port()
    log = out / "logs" / "mooncake_master.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    ports = [f"--rpc_port={port}", f"--metrics_port={metrics}", f"--rpc_address={HOST}"]
    with log.open("wb") as output:
        process = subprocess.Popen([program, *ports], stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_for(port, process, log)
            yield f"{HOST}:{port}"
        finally:
            process.terminate()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
            return
        time.sleep(0.1)
    end = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
    raise BenchmarkError(f"mooncake_master does not answer\n{end}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
