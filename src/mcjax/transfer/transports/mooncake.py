"""Bytes between processes by Mooncake's transfer engine over TCP, where it is installed (the extra `peers`).

A thin adapter: one engine an endpoint, the peer's engine is told by the descriptor's address. What Mooncake does not do
is declared in `Mooncake.capabilities` and explained in docs/transfer-peers.md.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import (
    AccessRefused,
    PeerLost,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
)
from mcjax.transfer.transports.endpoint import Capabilities
from mcjax.transfer.transports.lanes import Batch
from mcjax.transfer.transports.library import LibraryEndpoint, RegisteredRegion

FIX = "`pip install 'mcjax[peers]'` brings it, `apt-get install libibverbs1 libnuma1 libcurl4` what it loads"

PROBE_S = 0.5
"""How long a peer's port may take to accept when something went wrong."""

MOST_SPANS = 1024
"""In one call: of more than 2,000 or so it moves none, and none ever after to the same peer."""


def load(silence_s: int) -> Any:
    """The library's module. Raises `TransportUnavailable`."""
    # Read when it is loaded: its time-outs (30 s, unless told), and how much it logs.
    for variable, value in {
        "MC_TCP_PROGRESS_TIMEOUT_SEC": silence_s,
        "MC_TCP_STATUS_TIMEOUT_SEC": silence_s,
        "MC_LOG_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(variable, str(value))
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as problem:
        raise TransportUnavailable("mooncake", f"it cannot be imported ({problem})", FIX) from None


class Mooncake(LibraryEndpoint):
    """An engine of Mooncake's, over TCP. It listens on all of the machine's addresses, whatever `host` (where peers
    look for it) says, and whoever reaches its ports may read and write what is registered."""

    name = "mooncake"
    capabilities = Capabilities(
        guards=False,
        stale=False,  # one-sided: nothing of the peer's looks at epochs
        bounds=False,  # the peer checks that a span lies in something registered, not whose key it is
        stopped=False,  # a transfer ends by Mooncake's own time-out, not by the caller's deadline
        secret=False,
        versioned=False,
    )

    def __init__(self, host: str = "127.0.0.1", silence_s: int = 10, idle_s: float = 300.0):
        """`silence_s`: after so many seconds without progress Mooncake gives a transfer up. One value a process."""
        self._engine: Any = load(silence_s).TransferEngine()
        # It has no port where it failed, though it says 0 for protocols that there are none of.
        if status := self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise TransportUnavailable("mooncake", f"no engine can be made (status {status})", "see its log on stderr")
        self._silence_s = int(os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"])
        super().__init__(f"mooncake:{host}:{self._engine.get_rpc_port()}", idle_s)

    def _register(self, region: RegisteredRegion) -> None:
        if status := self._engine.register_memory(region.base, region.nbytes):
            raise AccessRefused(f"mooncake registers no such memory (status {status}): does it overlap another region?")

    def _deregister(self, region: RegisteredRegion) -> None:
        if not self._closing.is_set():
            self._engine.unregister_memory(region.base)

    def _transfer(self, batch: Batch[RegisteredRegion], local: NDArray[np.int64], remote: NDArray[np.int64]) -> None:
        engine, peer = self._engine, batch.remote.address.removeprefix("mooncake:")
        move = engine.batch_transfer_sync_write if batch.write else engine.batch_transfer_sync_read
        for start in range(0, len(local), MOST_SPANS):
            part, began_s = slice(start, start + MOST_SPANS), time.monotonic()
            status = move(peer, local[part].tolist(), remote[part].tolist(), batch.spans.nbytes[part].tolist())
            if status:
                raise self._explained(status, peer, time.monotonic() - began_s)
            if self._closing.is_set():
                raise TransferCancelled("the endpoint mooncake was closed")

    def _explained(self, status: int, peer: str, took_s: float) -> TransferError:
        """One number stands for all that can go wrong: what it was is guessed, from the time it took and the port."""
        problem = f"mooncake: status {status} of {peer}; its log on standard error may say why"
        if took_s >= self._silence_s:
            return TransferTimeout(f"{problem}. It did not answer for {took_s:.1f} s")
        host, _, port = peer.rpartition(":")
        try:
            socket.create_connection((host, int(port)), PROBE_S).close()
        except (OSError, ValueError):
            return PeerLost(f"{problem}. Nothing listens there")
        return AccessRefused(f"{problem}. The peer is there: it has most likely not registered what was asked for")

    def _shut_down(self) -> None:
        self._engine = None
