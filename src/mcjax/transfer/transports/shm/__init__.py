"""Bytes between the processes of one Linux host: shared memory in place, and one copy of any other memory."""

from mcjax.transfer.transports.shm.endpoint import ShmEndpoint

__all__ = ["ShmEndpoint"]
