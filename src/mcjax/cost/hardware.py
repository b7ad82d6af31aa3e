"""One instance's hardware and its host, as data: peaks, memories and links. The catalogue is `conf/hardware/*.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from mcjax.errors import ConfigError
from mcjax.types import NS_PER_S

_MAY_BE_ZERO = ("interconnect_bytes_per_s", "nic_latency_ns", "pcie_latency_ns", "ssd_bytes_per_s", "ssd_latency_ns")


@dataclass(frozen=True)
class Hardware:
    """An instance of `count` equal accelerators on one node.

    Bytes are decimal, rates are bytes/s in one direction. Whole numbers may be written as floats (`80e9`); anything
    else raises `ConfigError`.
    """

    name: str
    accelerator: str
    count: int
    """Accelerators in one instance; the cost models assume tensor parallelism over all of them."""
    peak_flops: int
    """Dense bf16 FLOP/s of one accelerator (f32 where that is what its programs use)."""
    hbm_bytes: int
    """Device memory of one accelerator."""
    hbm_bytes_per_s: int
    host_dram_bytes: int
    """Share of the node's DRAM that the KV pool gets by default."""
    pcie_bytes_per_s: int
    """Host to device (or back), all accelerators of the instance together."""
    nic_bytes_per_s: int
    """Out of (or into) the node, all network cards together."""
    interconnect_bytes_per_s: int
    """NVLink or ICI, out of one accelerator. 0 only where `count` is 1."""
    nic_latency_ns: int
    pcie_latency_ns: int
    source: str
    """Where the figures come from, in a line."""
    ssd_bytes_per_s: int = 0
    """Out of (or into) the node's SSDs, all together. 0 where none are given: then no block can be kept there."""
    ssd_latency_ns: int = 0
    nics: int = 1
    """Equal network cards that `nic_bytes_per_s` is of, where a topology tells them apart (`transfer.topology`)."""
    numa_nodes: int = 1
    """Sockets of a node that those are spread over, in order."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type != "int":
                continue
            value: object = getattr(self, field.name)
            key = f"hardware.{field.name}"
            if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
                raise ConfigError(key, value, "must be a whole number")
            if value < 0 or (value == 0 and field.name not in _MAY_BE_ZERO):
                raise ConfigError(key, value, "must be positive")
            object.__setattr__(self, field.name, int(value))
        if self.count > 1 and self.interconnect_bytes_per_s == 0:
            raise ConfigError("hardware.interconnect_bytes_per_s", 0, f"{self.count} accelerators need an interconnect")

    @property
    def total_hbm_bytes(self) -> int:
        return self.hbm_bytes * self.count

    @property
    def total_peak_flops(self) -> int:
        return self.peak_flops * self.count

    @property
    def total_hbm_bytes_per_s(self) -> int:
        return self.hbm_bytes_per_s * self.count

    def transfer_ns(self, nbytes: int, link: Literal["nic", "pcie", "ssd"] = "nic") -> int:
        """Nanoseconds to move `nbytes` alone on a link: latency plus bytes over bandwidth, rounded up.

        Raises `ConfigError` for the SSDs of a node that has none.
        """
        latency_ns, bytes_per_s = {
            "nic": (self.nic_latency_ns, self.nic_bytes_per_s),
            "pcie": (self.pcie_latency_ns, self.pcie_bytes_per_s),
            "ssd": (self.ssd_latency_ns, self.ssd_bytes_per_s),
        }[link]
        if not bytes_per_s:
            raise ConfigError(f"hardware.{link}_bytes_per_s", 0, f"{self.name} has none, or none is given")
        return latency_ns + -(-nbytes * NS_PER_S // bytes_per_s)
