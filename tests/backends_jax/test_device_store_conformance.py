"""The device's store keeps to the suite too; its bytes are read and written on the executor's thread."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mcjax.backends.jax.device_store import DevicePages
from mcjax.backends.jax.executor import JaxExecutor
from mcjax.backends.jax.programs import Geometry, Programs
from mcjax.models import builtin
from mcjax.transfer.transports.threaded import checksum
from store_suite import CAPACITY, Counter, content, machine

GEOMETRY = Geometry(pages=CAPACITY, page_tokens=8, max_batch=1, chunk_tokens=8, max_context_tokens=48)


class OnDevice(Counter):
    """Pages of an executor of its own; programs are shared."""

    programs: Programs | None = None

    def __init__(self, poison: bool) -> None:
        super().__init__()
        cls = type(self)
        if cls.programs is None:
            cls.programs = Programs(builtin.build(max_positions=GEOMETRY.max_context_tokens), GEOMETRY)
        import jax

        self._executor = JaxExecutor("p0", cls.programs, jax.local_devices()[0])
        self.store = DevicePages("n", self._executor, poison)

    def write(self, slots: Sequence[int], blocks: Sequence[int], parent: int | None) -> list[bytes]:
        rows = np.stack([content(block, self.store.block_bytes) for block in blocks])
        self._there(lambda: self._executor.write_pages(slots, rows))
        return [checksum(row) for row in rows]

    def read(self, slot: int) -> bytes:
        return self._there(lambda: self._executor.read_pages([slot]))[0].tobytes()

    def _there(self, work: Callable[[], Any]) -> Any:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._executor.submit_host(lambda: answers.put(work()))
        return answers.get(timeout=60)

    def close(self) -> None:
        self._executor.stop()


TestDevicePages = machine(lambda: OnDevice(poison=False), 8, 15)
TestPoisonedDevicePages = machine(lambda: OnDevice(poison=True), 6, 15)
