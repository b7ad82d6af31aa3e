"""Bytes between processes by NVIDIA's NIXL over UCX (`pip install --no-deps nixl-cu12`), where it is installed.

A thin adapter: one agent an endpoint, a region's registration and the agent's connection data travel base64-coded in
the descriptor. What NIXL does not do is declared in `Nixl.capabilities` and explained in docs/transfer-peers.md.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import logging
import os
import secrets
import struct
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import AccessRefused, PeerLost, TransferCancelled, TransferError, TransportUnavailable
from mcjax.transfer.transports.endpoint import Capabilities, Notice, RegionDescriptor
from mcjax.transfer.transports.lanes import Batch
from mcjax.transfer.transports.library import LibraryEndpoint, RegisteredRegion

FIX = "`pip install --no-deps nixl-cu12` brings it (what it requires beside, torch, it uses in type hints only)"

NOTICE = struct.Struct(">QI")
NOTICE_PERIOD_S = 0.001

SPIN_NS = 200_000
"""How long a transfer is asked after without a pause: a copy of 1 MiB takes half of it."""
MOST_PAUSE_S = 0.001

_KINDS: dict[str, tuple[type[TransferError], str]] = {
    "nixlRemoteDisconnectError": (PeerLost, "the peer is gone"),
    "nixlNotFoundError": (AccessRefused, "a span lies in no registered region, or nobody knows the peer"),
    "nixlNotAllowedError": (AccessRefused, "not allowed"),
    "nixlInvalidParamError": (AccessRefused, "not a transfer"),
    "nixlMismatchError": (AccessRefused, "the descriptor is not this NIXL's"),
    "nixlCancelledError": (TransferCancelled, "cancelled"),
}


def load() -> Any:
    """The library's module. Raises `TransportUnavailable`."""
    if not Path("/sys/class/infiniband").exists():
        # With no such device UCX's module for it is of no use, and with Debian's libibverbs it crashes at exit.
        os.environ.setdefault("UCX_MODULES", "^ib")
    try:
        module = importlib.import_module("nixl_cu12")
    except ImportError as problem:
        raise TransportUnavailable("nixl", f"nixl_cu12 cannot be imported ({problem})", FIX) from None
    # It tells of itself on standard output, which is the user's.
    logging.getLogger("nixl").setLevel(logging.WARNING)
    return module


def translated(problem: Exception) -> TransferError:
    """One of NIXL's exceptions as ours."""
    kind, text = _KINDS.get(type(problem).__name__, (TransferError, type(problem).__name__))
    return kind(f"nixl: {text} ({problem})")


class Nixl(LibraryEndpoint):
    """An agent of NIXL. UCX chooses the transport, by `UCX_TLS` among others; whoever reaches its ports may read and
    write what is registered."""

    name = "nixl"
    capabilities = Capabilities(
        notify=True,
        guards=False,
        stale=False,  # one-sided: nothing of the peer's looks at epochs
        bounds=False,  # checked by the sender's NIXL alone, against what the peer's metadata says
        stopped=False,  # a released request may still write, so it is not answered before it ends
        secret=False,
        versioned=False,
    )

    def __init__(self, backends: tuple[str, ...] = ("UCX",), idle_s: float = 300.0):
        module = load()
        name = f"mcjax-{secrets.token_hex(8)}"
        sync = module._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        try:
            config = module.nixl_agent_config(backends=list(backends), sync_mode=sync)
            self._agent: Any = module.nixl_agent(name, config)
        except Exception as problem:
            fix = "see UCX_TLS and UCX_LOG_LEVEL"
            raise TransportUnavailable("nixl", f"no agent can be made ({problem})", fix) from None
        super().__init__(f"nixl:{name}", idle_s)
        self._lock = threading.Lock()
        self._known: dict[str, set[bytes]] = {}
        """Metadata that the agent has been given, by the peer's name."""
        self._listener: threading.Thread | None = None

    def on_notice(self, notice: Notice | None) -> None:
        super().on_notice(notice)
        if notice is not None and self._listener is None:
            self._listener = threading.Thread(target=self._listen, name="mcjax-nixl-notices", daemon=True)
            self._listener.start()

    def _register(self, region: RegisteredRegion) -> None:
        try:
            region.registration = self._agent.register_memory([(region.base, region.nbytes, 0, "")], "DRAM")
        except Exception as problem:
            raise AccessRefused(f"nixl registers no such memory ({problem})") from None

    def _deregister(self, region: RegisteredRegion) -> None:
        if not self._closing.is_set():
            self._agent.deregister_memory(region.registration)

    def _detail(self, region: RegisteredRegion) -> dict[str, Any]:
        metadata = self._agent.get_partial_agent_metadata(region.registration, True, [])
        return {"metadata": base64.b64encode(metadata).decode()}

    def _transfer(self, batch: Batch[RegisteredRegion], local: NDArray[np.int64], remote: NDArray[np.int64]) -> None:
        peer = self._introduce(batch.remote)
        notice = b"" if batch.notify is None else NOTICE.pack(batch.remote.key, batch.notify)
        agent = self._agent
        try:
            handle = agent.initialize_xfer(
                "WRITE" if batch.write else "READ",
                agent.get_xfer_descs(_table(local, batch.spans.nbytes), "DRAM"),
                agent.get_xfer_descs(_table(remote, batch.spans.nbytes), "DRAM"),
                peer,
                notice,
            )
        except Exception as problem:
            self._forget(peer)
            raise translated(problem) from None
        try:
            self._finish(handle)
        except TransferError:
            self._forget(peer)
            raise
        except Exception as problem:
            self._forget(peer)
            raise translated(problem) from None
        finally:
            agent.release_xfer_handle(handle)

    def _finish(self, handle: Any) -> None:
        agent, began_ns, pause_s = self._agent, time.monotonic_ns(), 0.0
        state = agent.transfer(handle)
        while state == "PROC":
            if self._closing.is_set():
                raise TransferCancelled("the endpoint nixl was closed")
            if time.monotonic_ns() - began_ns > SPIN_NS:
                pause_s = min(MOST_PAUSE_S, pause_s + 20e-6)
            time.sleep(pause_s)
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise PeerLost(f"nixl: the transfer ended in {state}")

    def _introduce(self, remote: RegionDescriptor) -> str:
        """Tell the agent of a peer and its region, once. Returns the peer's name."""
        name = remote.address.removeprefix("nixl:")
        try:
            metadata = base64.b64decode(remote.detail["metadata"], validate=True)
        except (KeyError, TypeError, ValueError, binascii.Error):
            raise AccessRefused(f"the descriptor of a region of {remote.address} has no metadata") from None
        with self._lock:
            known = self._known.setdefault(name, set())
            if metadata not in known:
                try:
                    found = self._agent.add_remote_agent(metadata)
                except Exception as problem:
                    # It connects, so a backend that fails here is most likely a peer that is gone.
                    known_kind = type(problem).__name__ in _KINDS
                    raise translated(problem) if known_kind else PeerLost(f"nixl: no connection ({problem})") from None
                if (found.decode() if isinstance(found, bytes) else found) != name:
                    raise AccessRefused(f"the metadata in a descriptor is not that of {remote.address}")
                known.add(metadata)
        return name

    def _forget(self, name: str) -> None:
        """Drop a peer with which something went wrong: the next batch connects anew."""
        with self._lock:
            if self._known.pop(name, None):
                try:
                    self._agent.remove_remote_agent(name)
                except Exception:  # it may not know it any more, which is what was wanted
                    return

    def _listen(self) -> None:
        while not self._closing.wait(NOTICE_PERIOD_S):
            for messages in self._agent.get_new_notifs().values():
                for message in messages:
                    self._tell(message)

    def _tell(self, message: bytes) -> None:
        key, number = NOTICE.unpack(message) if len(message) == NOTICE.size else (-1, 0)
        notice = self._notice
        try:
            self._regions.find(key)
        except AccessRefused:
            self._stats.refused += 1
            return
        if notice is not None:
            notice(key, number)

    def _part(self, address: str) -> None:
        self._forget(address.removeprefix("nixl:"))

    def _shut_down(self) -> None:
        if self._listener is not None:
            self._listener.join()
        for name in list(self._known):
            self._forget(name)
        self._agent = None


def _table(addresses: NDArray[np.int64], nbytes: NDArray[np.int64]) -> NDArray[np.uint64]:
    """`[n, 3]`: address, length, device of each span."""
    return np.stack([addresses, nbytes, np.zeros_like(nbytes)], axis=1).astype(np.uint64)
