"""pyverbs, imported when an endpoint is made; and the three ways in which a machine has no RDMA, told apart.

pyverbs comes with the distribution's rdma-core. Its constants moved from `pyverbs.enums` to `pyverbs.libibverbs_enums`
between rdma-core 44 and 59.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mcjax.errors import TransportUnavailable

NAME = "rdma"


@dataclass(frozen=True)
class Verbs:
    """pyverbs' modules, under the names that they have in either version."""

    enums: Any
    device: Any
    pd: Any
    mr: Any
    cq: Any
    qp: Any
    addr: Any
    wr: Any
    error: type[Exception]
    """What every refused call raises; `error_code` is the errno where there is one."""


def load(imported: Callable[[str], Any] = importlib.import_module) -> Verbs:
    """Raises `TransportUnavailable` where pyverbs cannot be imported."""
    try:
        try:
            enums = imported("pyverbs.libibverbs_enums")
        except ModuleNotFoundError:
            enums = imported("pyverbs.enums")
        parts = {part: imported(f"pyverbs.{part}") for part in ("device", "pd", "mr", "cq", "qp", "addr", "wr")}
        error = imported("pyverbs.pyverbs_error").PyverbsError
    except ImportError as problem:
        raise TransportUnavailable(
            NAME,
            f"pyverbs cannot be imported ({problem})",
            "install the distribution's python3-pyverbs, which fits its own rdma-core, and let this Python find its "
            "folder (docs/transfer-rdma.md)",
        ) from None
    return Verbs(enums=enums, error=error, **parts)


def device_names(verbs: Verbs) -> list[str]:
    """Names of the devices, at least one. Raises `TransportUnavailable` where the kernel has no RDMA, or no device."""
    try:
        found = verbs.device.get_device_list()
    except verbs.error as problem:
        raise TransportUnavailable(
            NAME,
            f"the kernel offers no RDMA verbs ({problem})",
            "load ib_uverbs and the card's driver; a kernel built for clouds may have neither (Debian's generic "
            "linux-image-amd64 does)",
        ) from None
    if not found:
        raise TransportUnavailable(
            NAME,
            "there is no RDMA device",
            "load the card's driver, or make a device in software: "
            "`modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0`",
        )
    return [device.name.decode() for device in found]
