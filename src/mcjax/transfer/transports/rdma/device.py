"""Which device, port and address (GID) an endpoint uses, from what the kernel tells in `/sys/class/infiniband`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mcjax.errors import ConfigError

SYSFS = Path("/sys/class/infiniband")
ROCE_V2 = "RoCE v2"
_MAPPED_IPV4 = "0000:0000:0000:0000:0000:ffff:"


@dataclass(frozen=True, slots=True)
class Gid:
    """One way to address a port: `index` in its table, `value` as eight groups of four digits, `kind` of packets."""

    device: str
    index: int
    value: str
    kind: str

    @property
    def rank(self) -> int:
        """Less is better: RoCE v2 over IPv4 is routed by every network, RoCE v1 by none."""
        if self.kind != ROCE_V2:
            return 2
        return 0 if self.value.startswith(_MAPPED_IPV4) else 1


def gids(device: str, port: int, sysfs: Path = SYSFS, only: int | None = None) -> Iterator[Gid]:
    """Those of an active port that are set, in the order of its table; or the one at the index `only`."""
    place = sysfs / device / "ports" / str(port)
    if "ACTIVE" not in _text(place / "state"):
        return
    for index in itertools.count() if only is None else [only]:
        value = _text(place / "gids" / str(index))
        if not value:
            return
        if value.replace(":", "").strip("0"):
            yield Gid(device, index, value, _text(place / "gid_attrs" / "types" / str(index)))


def choose(
    devices: Iterable[str], device: str | None, gid_index: int | None, port: int = 1, sysfs: Path = SYSFS
) -> Gid:
    """The best address there is, of `device` and at `gid_index` where these are given; the first of equals.

    Raises `ConfigError` if there is none.
    """
    known = list(devices)
    if device is not None and device not in known:
        raise ConfigError("device", device, "there is no such RDMA device", known)
    best: Gid | None = None
    tables = (gids(name, port, sysfs, gid_index) for name in ([device] if device else known))
    for gid in itertools.chain.from_iterable(tables):
        if best is None or gid.rank < best.rank:
            best = gid
        # Tables are long, and reading them is slow.
        if not best.rank:
            break
    if best is None:
        which = f"index {gid_index} of " if gid_index is not None else ""
        raise ConfigError("device", device or " ".join(known), f"{which}port {port} has no address, or is not active")
    return best


def numa_node(device: str, sysfs: Path = SYSFS) -> int | None:
    """The node of memory that the card is next to, or None: a device in software has none, nor has a small machine."""
    node = _text(sysfs / device / "device" / "numa_node")
    return int(node) if node and int(node) >= 0 else None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
