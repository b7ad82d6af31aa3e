"""Every kind of endpoint that the conformance suite knows, and how to make one."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

from mcjax.errors import TransportUnavailable
from mcjax.transfer.transports.endpoint import Capabilities, Endpoint
from mcjax.transfer.transports.local_endpoint import LocalEndpoint, Switchboard
from mcjax.transfer.transports.secret import Secret
from mcjax.transfer.transports.tcp import TcpEndpoint
from mcjax.transfer.transports.tcp.dial import parse_address


def _nothing_missing() -> str:
    return ""


@dataclass(frozen=True)
class Kind:
    """One kind of endpoint.

    `make(secret)`: one on this machine. `where`: its class, `module:Class`, whose attribute `capabilities` goes into
    `docs/transfer-capabilities.md` also where the kind is missing. `missing()`: why there can be none here, or nothing.
    `version_at`: the constant, `module:NAME`, that is the version it speaks, for a kind that is versioned.
    `connect(address)`: a raw connection as its peers make it, for a kind that has connections.
    `mark`: that of pytest's under which its tests run, if not by default.
    """

    make: Callable[[Secret], Endpoint]
    where: str
    missing: Callable[[], str] = _nothing_missing
    version_at: str = ""
    connect: Callable[[str], socket.socket] | None = None
    mark: str = ""

    @property
    def capabilities(self) -> Capabilities:
        module, name = self.where.split(":")
        return getattr(importlib.import_module(module), name).capabilities


def _shm(secret: Secret) -> Endpoint:
    from mcjax.transfer.transports.shm import ShmEndpoint

    return ShmEndpoint(secret)


def _call_shm(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect("\0" + address.rsplit(":", 1)[1])
    return connection


def _rdma(secret: Secret) -> Endpoint:
    from mcjax.transfer.transports.rdma import RdmaEndpoint

    return RdmaEndpoint(secret)


def _no_rdma() -> str:
    """There is a device where these tests run in the guest of `tests/rdma`."""
    from mcjax.transfer.transports.rdma.library import device_names, load

    try:
        device_names(load())
    except TransportUnavailable as problem:
        return str(problem)
    return ""


def _call(address: str) -> socket.socket:
    return socket.create_connection(parse_address(address), timeout=10)


def _jax(secret: Secret) -> Endpoint:
    from mcjax.transfer.transports.jax import JaxEndpoint

    return JaxEndpoint(secret)


def _nixl(_secret: Secret) -> Endpoint:
    from mcjax.transfer.transports.nixl import Nixl

    return Nixl()


def _mooncake(_secret: Secret) -> Endpoint:
    from mcjax.transfer.transports.mooncake import Mooncake

    return Mooncake(silence_s=3)


def _not_installed(make: Callable[[Secret], Endpoint]) -> str:
    """In continuous integration it is installed, or the tests fail."""
    if "CI" in os.environ:
        return ""
    try:
        make(Secret.random()).close()
    except TransportUnavailable as problem:
        return str(problem)
    return ""


SWITCHBOARD = Switchboard()

KINDS: dict[str, Kind] = {
    "local": Kind(
        lambda secret: LocalEndpoint(secret, SWITCHBOARD), "mcjax.transfer.transports.local_endpoint:LocalEndpoint"
    ),
    "shm": Kind(
        _shm,
        "mcjax.transfer.transports.shm.endpoint:ShmEndpoint",
        lambda: "" if sys.platform == "linux" else "shared memory is for Linux",
        "mcjax.transfer.transports.shm.wire:VERSION",
        _call_shm,
    ),
    "tcp": Kind(
        TcpEndpoint,
        "mcjax.transfer.transports.tcp.endpoint:TcpEndpoint",
        version_at="mcjax.transfer.transports.tcp.handshake:VERSION",
        connect=_call,
    ),
    "rdma": Kind(
        _rdma,
        "mcjax.transfer.transports.rdma.endpoint:RdmaEndpoint",
        _no_rdma,
        "mcjax.transfer.transports.tcp.handshake:VERSION",
        _call,
        mark="rdma",
    ),
    "jax": Kind(
        _jax,
        "mcjax.transfer.transports.jax:JaxEndpoint",
        version_at="mcjax.transfer.transports.tcp.handshake:VERSION",
        connect=lambda address: _call(address.removeprefix("jax:")),
        mark="check_long",
    ),
    "nixl": Kind(_nixl, "mcjax.transfer.transports.nixl:Nixl", lambda: _not_installed(_nixl), mark="peers"),
    "mooncake": Kind(
        _mooncake, "mcjax.transfer.transports.mooncake:Mooncake", lambda: _not_installed(_mooncake), mark="peers"
    ),
}
