"""What `transfer.py` measures: ways to bring bytes from one process's memory into another's, all behind one face.

Every system reads blocks of `source`, which lies in the peer, into `target`, which lies here.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.transfer.transports.endpoint import Endpoint, RegionDescriptor, Spans
from mcjax.transfer.transports.secret import Secret

SECRET = Secret(b"of a benchmark on loopback")
"""Both sides are this benchmark's own children."""
DEADLINE_S = 120.0
MOONCAKE_MOST = 1024
"""Blocks in one call: of more than 2,000 or so Mooncake moves none."""

Step = Callable[[], object]


@dataclass(frozen=True)
class Buffers:
    """`[nbytes]` uint8 each: the same memory on both sides, though only the peer's `source` is read by systems that
    have a peer."""

    source: NDArray[np.uint8]
    target: NDArray[np.uint8]


@dataclass(frozen=True)
class Plan:
    """`batches` calls of `batch` blocks each, of `block_bytes` bytes. Blocks lie in an order that has no neighbours in
    it (unless `seed` is 0), so none can be moved together."""

    block_bytes: int
    batch: int
    batches: int
    seed: int = 1

    @property
    def nbytes(self) -> int:
        return self.block_bytes * self.batch * self.batches

    def spans(self, buffer_bytes: int) -> list[Spans]:
        places = buffer_bytes // self.block_bytes
        order = np.arange(places)
        if self.seed:
            order = np.random.default_rng(self.seed).permutation(places)
        found: list[Spans] = []
        for number in range(self.batches):
            chosen = np.arange(number * self.batch, (number + 1) * self.batch) % places
            starts = order[chosen] * self.block_bytes
            # From one place to another one: the same on both sides would favour nobody, but nobody does that.
            targets = order[(chosen + places // 2) % places] * self.block_bytes
            found.append(Spans(targets, starts, np.full(self.batch, self.block_bytes, np.int64)))
        return found


class System(ABC):
    """One side of one way. `describe` is asked of the peer, `connect` and `prepared` of whoever reads."""

    def __init__(self, role: str, buffers: Buffers):
        self.role = role
        self.buffers = buffers

    def describe(self) -> Any:
        """What the reader must know; JSON."""
        return None

    def connect(self, description: Any) -> None:
        return

    @abstractmethod
    def prepared(self, plan: Plan, verified: bool) -> list[Step]:
        """A call for each batch; what each needs is made ready now, untimed, where a user would do so too."""

    def close(self) -> None:
        return


class Memcpy(System):
    """Of the same bytes between the same places, in one process."""

    def prepared(self, plan: Plan, verified: bool) -> list[Step]:
        source, target = self.buffers.source.ctypes.data, self.buffers.target.ctypes.data
        return [
            lambda spans=spans: _copy(target, source, spans.local.tolist(), spans.remote.tolist(), plan.block_bytes)
            for spans in plan.spans(len(self.buffers.target))
        ]


def _copy(target: int, source: int, tos: Sequence[int], froms: Sequence[int], nbytes: int) -> None:
    for to, at in zip(tos, froms, strict=True):
        ctypes.memmove(target + to, source + at, nbytes)


class Foreign(System):
    """`process_vm_readv` by itself: one copy by the kernel, and nothing to know whether it was right to."""

    def __init__(self, role: str, buffers: Buffers):
        super().__init__(role, buffers)
        self._readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._readv.restype = ctypes.c_ssize_t
        self._readv.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
        self._there = (0, 0)

    def describe(self) -> Any:
        return [os.getpid(), self.buffers.source.ctypes.data]

    def connect(self, description: Any) -> None:
        self._there = tuple(description)

    def prepared(self, plan: Plan, verified: bool) -> list[Step]:
        pid, base = self._there
        own = self.buffers.target.ctypes.data
        steps: list[Step] = []
        for spans in plan.spans(len(self.buffers.target)):
            for start in range(0, len(spans), 1024):
                part = slice(start, start + 1024)
                near = np.stack([own + spans.local[part], spans.nbytes[part]], axis=1)
                far = np.stack([base + spans.remote[part], spans.nbytes[part]], axis=1)
                steps.append(lambda near=near, far=far: self._read(pid, near, far))
        return steps

    def _read(self, pid: int, near: NDArray[np.int64], far: NDArray[np.int64]) -> None:
        wanted = int(near[:, 1].sum())
        got = self._readv(pid, near.ctypes.data, len(near), far.ctypes.data, len(far), 0)
        if got != wanted:
            raise OSError(ctypes.get_errno(), f"{got} of {wanted} bytes")


class RawSocket(System):
    """A stream socket over loopback, `sendall` to `recv_into` with MSG_WAITALL: the least that TCP can do.

    A request (a count and offsets) a batch; its blocks come one behind the other.
    """

    def __init__(self, role: str, buffers: Buffers):
        super().__init__(role, buffers)
        self._source, self._target = memoryview(buffers.source.data), memoryview(buffers.target.data)
        self._listener = socket.create_server(("127.0.0.1", 0)) if role == "peer" else None
        self._connection: socket.socket | None = None
        if self._listener is not None:
            threading.Thread(target=self._serve, daemon=True).start()

    def describe(self) -> Any:
        assert self._listener is not None
        return self._listener.getsockname()

    def connect(self, description: Any) -> None:
        self._connection = socket.create_connection(tuple(description))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def prepared(self, plan: Plan, verified: bool) -> list[Step]:
        steps: list[Step] = []
        for spans in plan.spans(len(self.buffers.target)):
            head = np.array([len(spans), plan.block_bytes, *spans.remote.tolist()], np.int64).tobytes()
            views = [self._target[at : at + plan.block_bytes] for at in spans.local.tolist()]
            steps.append(lambda head=head, views=views: self._read(head, views))
        return steps

    def _read(self, head: bytes, views: Sequence[memoryview]) -> None:
        connection = self._connection
        assert connection is not None
        connection.sendall(head)
        for view in views:
            _receive(connection, view)

    def _serve(self) -> None:
        assert self._listener is not None
        connection, _ = self._listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = np.zeros(2, np.int64)
        with contextlib.suppress(OSError):
            while True:
                _receive(connection, memoryview(head.data).cast("B"))
                offsets = np.zeros(head[0], np.int64)
                _receive(connection, memoryview(offsets.data).cast("B"))
                size = int(head[1])
                for at in offsets.tolist():
                    connection.sendall(self._source[at : at + size])


def _receive(connection: socket.socket, view: memoryview) -> None:
    while view:
        got = connection.recv_into(view, 0, socket.MSG_WAITALL)
        if not got:
            raise ConnectionResetError("end of the stream")
        view = view[got:]


class Nixl(System):
    """NIXL's own API, prepared as its users prepare it: both sides' blocks once, a request a batch; asked after
    without a pause."""

    def __init__(self, role: str, buffers: Buffers):
        super().__init__(role, buffers)
        from mcjax.transfer.transports.nixl import load

        module = load()
        self._agent = module.nixl_agent(f"{role}-{os.getpid()}", module.nixl_agent_config(backends=["UCX"]))
        self._mine = buffers.source if role == "peer" else buffers.target
        self._agent.register_memory([(self._mine.ctypes.data, self._mine.nbytes, 0, "")], "DRAM")
        self._name, self._base = "", 0
        self._tables: dict[int, tuple[Any, Any]] = {}

    def describe(self) -> Any:
        return [base64.b64encode(self._agent.get_agent_metadata()).decode(), self._mine.ctypes.data]

    def connect(self, description: Any) -> None:
        name = self._agent.add_remote_agent(base64.b64decode(description[0]))
        self._name, self._base = name.decode() if isinstance(name, bytes) else name, description[1]

    def prepared(self, plan: Plan, verified: bool) -> list[Step]:
        size, agent = plan.block_bytes, self._agent
        if size not in self._tables:
            starts = np.arange(0, self._mine.nbytes - size + 1, size)
            near = agent.get_xfer_descs(_described(self._mine.ctypes.data + starts, size), "DRAM")
            far = agent.get_xfer_descs(_described(self._base + starts, size), "DRAM")
            self._tables[size] = agent.prep_xfer_dlist("", near), agent.prep_xfer_dlist(self._name, far)
        return [
            lambda near=spans.local // size, far=spans.remote // size: self._read(size, near, far)
            for spans in plan.spans(self._mine.nbytes)
        ]

    def _read(self, size: int, near: NDArray[np.int64], far: NDArray[np.int64]) -> None:
        agent, (own, theirs) = self._agent, self._tables[size]
        handle = agent.make_prepped_xfer("READ", own, near, theirs, far, b"")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError(f"NIXL: {state}")


def _described(addresses: NDArray[np.int64], size: int) -> NDArray[np.uint64]:
    return np.stack([addresses, np.full_like(addresses, size), np.zeros_like(addresses)], axis=1).astype(np.uint64)


class Mooncake(System):
    """The transfer engine's own API over TCP: `transfer_sync_read` for one block, `batch_transfer_sync_read` for
    more."""

    def __init__(self, role: str, buffers: Buffers):
        super().__init__(role, buffers)
        from mcjax.transfer.transports.mooncake import load

        self._engine = load(30).TransferEngine()
        if status := self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise OSError(f"Mooncake: status {status}")
        self._mine = buffers.source if role == "peer" else buffers.target
        self._engine.register_memory(self._mine.ctypes.data, self._mine.nbytes)
        self._there, self._base = "", 0

    def describe(self) -> Any:
        return [f"127.0.0.1:{self._engine.get_rpc_port()}", self._mine.ctypes.data]

    def connect(self, description: Any) -> None:
        self._there, self._base = description

    def prepared(self, plan: Plan, verified: bool) -> list[Step]:
        own, steps = self._mine.ctypes.data, list[Step]()
        for spans in plan.spans(self._mine.nbytes):
            for start in range(0, len(spans), MOONCAKE_MOST):
                part = slice(start, start + MOONCAKE_MOST)
                near, far = (own + spans.local[part]).tolist(), (self._base + spans.remote[part]).tolist()
                steps.append(lambda near=near, far=far: self._read(near, far, plan.block_bytes))
        return steps

    def _read(self, near: list[int], far: list[int], size: int) -> None:
        if len(near) == 1:
            status = self._engine.transfer_sync_read(self._there, near[0], far[0], size)
        else:
            status = self._engine.batch_transfer_sync_read(self._there, near, far, [size] * len(near))
        if status:
            raise OSError(f"Mooncake: status {status}")


class OfEndpoint(System):
    """One of ours, by its `Endpoint` alone. `verified` asks for a checksum of each block as it arrived."""

    def __init__(self, role: str, buffers: Buffers, make: Callable[[Secret], Endpoint]):
        super().__init__(role, buffers)
        self._endpoint = make(SECRET)
        self._exposed = self._endpoint.expose(buffers.source if role == "peer" else buffers.target)
        self._remote: RegionDescriptor | None = None

    def describe(self) -> Any:
        return self._exposed.descriptor().to_json()

    def connect(self, description: Any) -> None:
        self._remote = RegionDescriptor.from_json(description)

    def prepared(self, plan: Plan, verified: bool) -> list[Step]:
        return [lambda spans=spans: self._read(spans, verified) for spans in plan.spans(len(self.buffers.target))]

    def _read(self, spans: Spans, verified: bool) -> None:
        assert self._remote is not None
        pending = self._endpoint.read(self._exposed, self._remote, spans, deadline_s=DEADLINE_S, checksums=verified)
        results = pending.result()
        for error in results.errors.values():
            raise error

    def close(self) -> None:
        self._endpoint.close()


class InProcess(OfEndpoint):
    """Two `local` endpoints of one process."""

    def __init__(self, role: str, buffers: Buffers):
        from mcjax.transfer.transports.local_endpoint import LocalEndpoint, Switchboard

        switchboard = Switchboard()
        super().__init__(role, buffers, lambda secret: LocalEndpoint(secret, switchboard))
        self._owner = LocalEndpoint(SECRET, switchboard)
        self._remote = self._owner.expose(buffers.source).descriptor()

    def close(self) -> None:
        super().close()
        self._owner.close()


@dataclass(frozen=True)
class Kind:
    """`make(role, buffers)`; `verifies`: whether it is also measured with checksums; `peer`: whether there is a second
    process."""

    make: Callable[[str, Buffers], System]
    about: str
    verifies: bool = False
    peer: bool = True


def _endpoint(about: str, make: Callable[[Secret], Endpoint], verifies: bool = False) -> Kind:
    return Kind(lambda role, buffers: OfEndpoint(role, buffers, make), about, verifies)


def _shm(secret: Secret) -> Endpoint:
    from mcjax.transfer.transports.shm import ShmEndpoint

    return ShmEndpoint(secret)


def _shm_by_address(secret: Secret) -> Endpoint:
    from mcjax.transfer.transports.shm import ShmEndpoint

    return ShmEndpoint(secret, map_files=False)


def _tcp(secret: Secret) -> Endpoint:
    from mcjax.transfer.transports.tcp import TcpEndpoint

    return TcpEndpoint(secret)


def _jax(secret: Secret) -> Endpoint:
    from mcjax.transfer.transports.jax import JaxEndpoint

    return JaxEndpoint(secret)


def _rdma(secret: Secret) -> Endpoint:
    from mcjax.transfer.transports.rdma import RdmaEndpoint

    return RdmaEndpoint(secret)


def _nixl(_secret: Secret) -> Endpoint:
    from mcjax.transfer.transports.nixl import Nixl as Adapter

    return Adapter()


def _mooncake(_secret: Secret) -> Endpoint:
    from mcjax.transfer.transports.mooncake import Mooncake as Adapter

    return Adapter()


SYSTEMS: dict[str, Kind] = {
    "memcpy": Kind(Memcpy, "in one process", peer=False),
    "process_vm_readv": Kind(Foreign, "by itself"),
    "raw socket": Kind(RawSocket, "TCP over loopback, MSG_WAITALL"),
    "local": Kind(InProcess, "mcjax, in one process", verifies=True, peer=False),
    "shm": _endpoint("mcjax, memory files mapped in place", _shm, verifies=True),
    "shm, any memory": _endpoint("mcjax, by process_vm_readv", _shm_by_address, verifies=True),
    "tcp": _endpoint("mcjax", _tcp, verifies=True),
    "rdma": _endpoint("mcjax, verbs", _rdma, verifies=True),
    "NIXL": Kind(Nixl, "its own API, UCX's default transports"),
    "Mooncake": Kind(Mooncake, "its own API, TCP"),
    "jax": _endpoint("mcjax, by jax.experimental.transfer", _jax),
    "nixl endpoint": _endpoint("mcjax's adapter", _nixl),
    "mooncake endpoint": _endpoint("mcjax's adapter", _mooncake),
}
