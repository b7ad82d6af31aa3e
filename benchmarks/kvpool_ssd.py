"""`ssd`: blocks to a node's SSD and back, against fio on the same disk with the same pattern, in turns.

The pattern is the transport's: slots of a header page and a payload, one behind the other, O_DIRECT, as many requests
at a time as it has threads, one sync a batch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine_timing import Timing, speedup
from kvpool_way import Way, random_bytes
from measure import BenchmarkError, say

from mcjax.kvpool.keys import KeyTable
from mcjax.kvpool.stores.host import HostStore
from mcjax.kvpool.stores.ssd.store import SsdStore
from mcjax.transfer.transports.file import FileTransport
from mcjax.types import KVFormat, KVGroup

BLOCK_BYTES, BATCH, ROUNDS = 2**20, 256, 12
DEPTH = 4
"""Requests at a time: the transport's threads, and fio's."""
ENGINES = ("psync", "io_uring")
"""Threads that each have one request at a time, as ours do, and one thread that has them all."""


def run(out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """For each size: bytes a second of puts and gets, of fio's writes and reads, and ratios by round."""
    batch, rounds = options.batch or BATCH, options.rounds or ROUNDS
    folder: Path = options.disk or out
    engines, why = _engines()
    rows = [measured(folder, nbytes, batch, rounds, engines) for nbytes in options.block_bytes or [BLOCK_BYTES]]
    about = f"Batches of {batch}, {rounds} rounds, {DEPTH} requests at a time, one sync a batch."
    if engines:
        about += f" {_version()}; ours against the faster of its engines."
    return {"batch": batch, "rounds": rounds, "depth": DEPTH, "about": about, "why": why, "rows": rows}


def measured(folder: Path, block_bytes: int, batch: int, rounds: int, engines: Sequence[str]) -> dict[str, Any]:
    """One block size. The store has room for one batch, so every put goes to the same slots, as fio's writes do."""
    say(f"ssd: {batch} blocks of {block_bytes:,} bytes, {rounds} rounds")
    with tempfile.TemporaryDirectory(prefix="kvpool-", dir=folder) as name:
        tier = Path(name)
        table = KeyTable()
        kv_format = KVFormat("benchmark", 1, (KVGroup(bytes_per_token=block_bytes),))
        store = SsdStore("node", tier / "tier", batch, block_bytes, kv_format, table)
        outside = HostStore("node", batch, block_bytes, "outside")
        random_bytes(outside, 0)
        file = FileTransport(threads=DEPTH)
        way = Way(store, outside, [file], table.intern([index.to_bytes(32, "little") for index in range(batch)]))
        times: dict[str, list[float]] = {}
        try:
            for number in range(rounds + 1):
                found = {"put": _timed(lambda: way.put(True))}
                found["get unverified"] = _timed(lambda: way.get(False))
                found["get verified"] = _timed(lambda: way.get(True))
                way.forget()
                for way_there in ("write", "read"):
                    for engine in engines:
                        took_s = _fio(tier, way_there, store.slot_bytes, batch, engine)
                        found[f"fio {way_there}, {engine}"] = took_s
                for side, seconds in found.items():
                    if number:  # the first writes of preallocated space are slower, ours and fio's
                        times.setdefault(side, []).append(seconds)
        finally:
            file.close()
            way.close()
            store.close()
    return {"block_bytes": block_bytes, "slot_bytes": store.slot_bytes, "sides": _sides(times, batch * block_bytes)}


def _sides(times: dict[str, list[float]], nbytes: int) -> dict[str, Any]:
    """Rates count payloads only, for fio too: its blocks are as long as a slot."""
    timings = {side: Timing(seconds, seconds) for side, seconds in times.items()}
    fastest: dict[str, Timing] = {}
    for way in ("write", "read"):
        peers = [timing for side, timing in timings.items() if side.startswith(f"fio {way}")]
        if peers:
            fastest[way] = min(peers, key=lambda timing: timing.median_s)
    sides: dict[str, Any] = {}
    for side, timing in timings.items():
        peer = fastest.get("write" if side == "put" or side.startswith("fio write") else "read")
        sides[side] = {
            "median_bytes_per_s": nbytes / timing.median_s,
            "best_bytes_per_s": nbytes / timing.best_s,
            "ratio": None if peer is None else speedup(timing, peer),
        }
    return sides


def _timed(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _fio(folder: Path, way: str, nbytes: int, count: int, engine: str) -> float:
    """Seconds that fio takes for `count` blocks, as it says itself: without its start and end.

    Raises `BenchmarkError` with the end of its output if it fails.
    """
    # `psync` has one request at a time in a thread, so the depth is its number of threads, each with its share.
    threads = DEPTH if engine == "psync" else 1
    share = count // threads
    arguments = [
        *("fio", "--name=blocks", "--output-format=json", f"--rw={way}", f"--bs={nbytes}", "--direct=1", "--thread"),
        *(f"--filename={folder / 'fio'}", f"--size={share * nbytes}", f"--numjobs={threads}", "--group_reporting"),
        *(f"--ioengine={engine}", f"--iodepth={DEPTH if threads == 1 else 1}", f"--offset_increment={share * nbytes}"),
        *("--fallocate=none", "--overwrite=1"),
    ]
    if way == "write":
        arguments.append("--end_fsync=1")  # of preallocated space that was written before: the same as an fdatasync
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError("fio: " + "\n".join((done.stdout + done.stderr).splitlines()[-5:]))
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    if job[way]["io_bytes"] != threads * share * nbytes:
        raise BenchmarkError(f"fio: {job[way]['io_bytes']} bytes instead of {threads * share * nbytes}")
    return job[way]["runtime"] / 1e3 * count / (threads * share)


def _engines() -> tuple[list[str], str]:
    """The ways that fio has here, or why there is none."""
    if shutil.which("fio") is None:
        return [], "it is not installed (`apt-get install fio`)"
    known = subprocess.run(["fio", "--enghelp"], capture_output=True, text=True, check=False).stdout
    found = [engine for engine in ENGINES if engine in known]
    return found, "" if found else f"it has none of the engines {', '.join(ENGINES)}"


def _version() -> str:
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=False).stdout.strip()
