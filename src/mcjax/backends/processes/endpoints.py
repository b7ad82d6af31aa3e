"""The endpoints that workers reach each other by, by the name that the config gives (`launcher.transport`)."""

from __future__ import annotations

from mcjax.errors import ConfigError
from mcjax.transfer.transports.endpoint import Endpoint
from mcjax.transfer.transports.secret import Secret

KINDS = ("shm", "tcp", "rdma", "jax")


def make_endpoint(kind: str, secret: Secret, host: str) -> Endpoint:
    """An endpoint of that kind, bound to `host` where it listens on a network.

    Raises `TransportUnavailable` where this machine has no such thing.
    """
    if kind == "tcp":
        from mcjax.transfer.transports.tcp.endpoint import TcpEndpoint

        return TcpEndpoint(secret, host=host)
    if kind == "shm":
        from mcjax.transfer.transports.shm.endpoint import ShmEndpoint

        return ShmEndpoint(secret)
    if kind == "rdma":
        from mcjax.transfer.transports.rdma import RdmaEndpoint

        return RdmaEndpoint(secret, host=host)
    if kind == "jax":
        from mcjax.transfer.transports.jax import JaxEndpoint

        return JaxEndpoint(secret, host=host)
    raise ConfigError("launcher.transport", kind, "is no way between processes", KINDS)
