"""Endpoints over TCP: see `docs/transfer-tcp.md` for the wire format and the limits."""

from __future__ import annotations

from mcjax.transfer.transports.tcp.endpoint import TcpEndpoint
from mcjax.transfer.transports.tcp.tls import Tls

__all__ = ["TcpEndpoint", "Tls"]
