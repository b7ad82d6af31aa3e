"""Bytes between hosts by RDMA verbs: one-sided reads and writes by the network card, with no copy and no peer's CPU."""

from mcjax.transfer.transports.rdma.endpoint import RdmaEndpoint

__all__ = ["RdmaEndpoint"]
