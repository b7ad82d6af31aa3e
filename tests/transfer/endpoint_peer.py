"""A peer for the tests of endpoints: a child process that shows regions and does as it is told, by lines of JSON."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from mcjax.kvpool.stores.host import HostStore
from mcjax.kvpool.stores.slab import Slab
from mcjax.transfer.transports.endpoint import RegionDescriptor, Spans
from mcjax.transfer.transports.remote import expose_memory
from mcjax.transfer.transports.secret import VARIABLE, Secret

ALIGNMENT = 4096


@functools.lru_cache(maxsize=6)
def pattern(nbytes: int, seed: int) -> NDArray[np.uint8]:
    """Bytes that tell when they are at the wrong place. Not to be changed."""
    made = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    made.flags.writeable = False
    return made


def buffer_of(nbytes: int, seed: int | None, misaligned_by: int = 0) -> NDArray[np.uint8]:
    """`[nbytes]` whose address is `misaligned_by` beyond a page's beginning; zeros without a seed."""
    whole = np.zeros(nbytes + 2 * ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT + misaligned_by
    buffer = whole[start : start + nbytes]
    if seed is not None:
        buffer[:] = pattern(nbytes, seed)
    return buffer


def slab_of(nbytes: int, seed: int | None, misaligned_by: int = 0) -> NDArray[np.uint8]:
    """The same, in a memory file that other processes can map."""
    slab = Slab(nbytes + misaligned_by, huge_pages="never")
    buffer = slab.blocks(slab.carve(1, slab.nbytes))[0][misaligned_by : misaligned_by + nbytes]
    if seed is not None:
        buffer[:] = pattern(nbytes, seed)
    weakref.finalize(buffer.base, slab.close)
    return buffer


class Peer:
    """The parent's side. `ask` returns the answer; a child that is gone raises `EOFError`."""

    def __init__(self, kind: str, secret: Secret, environment: dict[str, str] | None = None):
        tests = Path(__file__).parent
        paths = [str(tests), *(path for path in sys.path if path)]
        hidden = {VARIABLE: secret.hand_over().hex()}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **hidden, **(environment or {})},
        )

    def ask(self, what: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise EOFError(what) from None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(what)
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["answer"]

    def expose(self, nbytes: int, seed: int | None = None, **more: Any) -> RegionDescriptor:
        return RegionDescriptor.from_json(self.ask("expose", nbytes=nbytes, seed=seed, **more))

    def digest(self, descriptor: RegionDescriptor, offset: int = 0, nbytes: int | None = None) -> str:
        return self.ask("digest", key=descriptor.key, offset=offset, nbytes=nbytes)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """It stands still, its connections stay open."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.go_on()
        with contextlib.suppress(EOFError, RuntimeError):
            self.ask("close")
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()


class InProcessPeer:
    """A `Peer` for kinds that do not leave their process: no child that could be killed, else the same."""

    def __init__(self, kind: str, secret: Secret):
        self._child = _Child(kind, secret)

    def ask(self, what: str, **arguments: Any) -> Any:
        try:
            return json.loads(json.dumps(getattr(self._child, what)(**arguments)))
        except Exception as problem:
            raise RuntimeError(f"{type(problem).__name__}: {problem}") from problem

    expose = Peer.expose
    digest = Peer.digest

    def close(self) -> None:
        self._child.close()


class _Guard:
    """Says no of what was forbidden, and of everything once it has been asked `calls` times."""

    def __init__(self, calls: int | None):
        self.calls = calls
        self.forbidden: list[tuple[int, int]] = []
        self.epochs: set[int] = set()

    def __call__(self, offset: int, nbytes: int, epoch: int) -> bool:
        self.epochs.add(epoch)
        if self.calls is not None:
            self.calls -= 1
            if self.calls < 0:
                return False
        return not any(offset < end and start < offset + nbytes for start, end in self.forbidden)


class _Child:
    def __init__(self, kind: str, secret: Secret):
        from endpoint_kinds import KINDS

        self.endpoint = KINDS[kind].make(secret)
        self.regions: dict[int, Any] = {}
        self.guards: dict[int, _Guard] = {}
        self.stores: dict[int, HostStore] = {}
        self.notices: list[tuple[int, int]] = []
        self.seen: list[str] = []
        self.notice_takes_s = 0.0
        self.stopping = threading.Event()
        self.loops: list[threading.Thread] = []
        self.endpoint.on_notice(self._notice)

    def _notice(self, key: int, number: int) -> None:
        time.sleep(self.notice_takes_s)
        self.seen.append(self.digest(key, 0, None))
        self.notices.append((key, number))

    def expose(
        self,
        nbytes: int,
        seed: int | None,
        misaligned_by: int = 0,
        writable: bool = True,
        guarded: bool = False,
        guard_calls: int | None = None,
        file: bool = False,
        layout: dict[str, Any] | None = None,
    ) -> str:
        """`guarded` or `guard_calls`: with a guard. `file`: in a memory file, as the slabs of pools are."""
        guard = _Guard(guard_calls) if guarded or guard_calls is not None else None
        buffer = slab_of(nbytes, seed, misaligned_by) if file else buffer_of(nbytes, seed, misaligned_by)
        exposed = self.endpoint.expose(buffer, writable=writable, guard=guard, layout=layout)
        self.regions[exposed.key] = exposed
        if guard is not None:
            self.guards[exposed.key] = guard
        return exposed.descriptor().to_json()

    def memory(self, capacity: int, block_bytes: int, writable: bool = True) -> str:
        """A node's host memory, shown slot by slot."""
        store = HostStore("far", capacity, block_bytes, huge_pages="never")
        exposed = expose_memory(self.endpoint, store, writable)
        self.regions[exposed.key], self.stores[exposed.key] = exposed, store
        return exposed.descriptor().to_json()

    def reserve(self, key: int, count: int, seed: int | None) -> tuple[list[int], int]:
        """Slots and the epoch as of which they are the asker's; with a seed, each is filled."""
        store = self.stores[key]
        slots = store.reserve(count)
        if seed is not None:
            for slot in slots:
                store.buffer()[slot] = pattern(store.block_bytes, seed + slot)
        return slots, store.epoch

    def free(self, key: int, slots: list[int]) -> None:
        self.stores[key].free(slots)

    def block_digests(self, key: int, slots: list[int]) -> list[str]:
        return [xxhash.xxh3_128(self.stores[key].buffer()[slot].tobytes()).hexdigest() for slot in slots]

    def keys(self) -> list[int]:
        return list(self.regions)

    def descriptor(self, key: int) -> str:
        return self.regions[key].descriptor().to_json()

    def digest(self, key: int, offset: int, nbytes: int | None) -> str:
        buffer = self.regions[key].buffer
        end = len(buffer) if nbytes is None else offset + nbytes
        return xxhash.xxh3_128(buffer[offset:end].tobytes()).hexdigest()

    def fill(self, key: int, seed: int) -> None:
        buffer = self.regions[key].buffer
        buffer[:] = pattern(len(buffer), seed)

    def poke(self, key: int, offset: int) -> None:
        """One byte is no longer what it was."""
        self.regions[key].buffer[offset] ^= 0x40

    def advance(self, key: int, seed: int | None = None) -> None:
        """Somebody else's from now on; with a seed, filled with their bytes at once."""
        region = self.regions[key]
        theirs = None if seed is None else pattern(region.nbytes, seed)  # made before: then not a moment is lost
        region.advance()
        if theirs is not None:
            region.buffer[:] = theirs

    def forbid(self, key: int, offset: int, nbytes: int) -> None:
        self.guards[key].forbidden.append((offset, offset + nbytes))

    def guard_epochs(self, key: int) -> list[int]:
        return sorted(self.guards[key].epochs)

    def withdraw(self, key: int) -> None:
        self.endpoint.withdraw(self.regions.pop(key))

    def withdraw_and_watch(self, key: int, seconds: float) -> None:
        """Nothing touches the buffer any more from the moment that it has been taken back."""
        region = self.regions.pop(key)
        self.endpoint.withdraw(region)
        region.buffer[:] = 0x5A
        time.sleep(seconds)
        assert (region.buffer == 0x5A).all(), "a write landed in a region that was withdrawn"

    def told(self) -> list[tuple[int, int]]:
        return self.notices

    def seen_when_told(self) -> list[str]:
        """Digest of the region as each notice found it."""
        return self.seen

    def take_notices_slowly(self, seconds: float) -> None:
        self.notice_takes_s = seconds

    def begin(self, descriptor: str, write: bool, nbytes: int) -> None:
        """Read or write a peer's region again and again, until this process is closed or killed."""
        remote = RegionDescriptor.from_json(descriptor)
        local = self.endpoint.expose(buffer_of(nbytes, 5))
        spans = Spans.of([(0, 0, nbytes)])
        move = self.endpoint.write if write else self.endpoint.read

        def loop() -> None:
            while not self.stopping.is_set():
                move(local, remote, spans, deadline_s=5.0).result()

        assert not move(local, remote, spans, deadline_s=30.0).result().errors
        self.loops.append(threading.Thread(target=loop, daemon=True))
        self.loops[-1].start()

    def held(self) -> dict[str, Any]:
        """What must not grow: threads, descriptors."""
        threads = sorted(thread.name for thread in threading.enumerate())
        return {"threads": threads, "descriptors": len(os.listdir("/proc/self/fd"))}

    def stats(self) -> dict[str, int]:
        stats = self.endpoint.stats()
        return {name: getattr(stats, name) for name in stats.__slots__}

    def close(self) -> None:
        self.stopping.set()
        for thread in self.loops:
            thread.join()
        self.endpoint.close()


def peer_of(kind: str, secret: Secret, environment: dict[str, str] | None = None) -> Peer:
    from endpoint_kinds import KINDS

    if KINDS[kind].capabilities.process:
        return Peer(kind, secret, environment)
    return InProcessPeer(kind, secret)  # pyright: ignore[reportReturnType]


def _main(kind: str) -> None:
    child = _Child(kind, Secret(bytes.fromhex(os.environ[VARIABLE])))
    for line in sys.stdin:
        order = json.loads(line)
        what = order.pop("do")
        try:
            answer = {"answer": getattr(child, what)(**order)}
        except Exception as problem:
            answer = {"error": f"{type(problem).__name__}: {problem}"}
        print(json.dumps(answer), flush=True)
        if what == "close":
            return


if __name__ == "__main__":
    _main(sys.argv[1])
