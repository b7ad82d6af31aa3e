"""Where a shared-memory endpoint is: on which start of which machine, and under which name of a socket."""

from __future__ import annotations

import secrets
from pathlib import Path

from mcjax.errors import AccessRefused, PeerLost

LONGEST_NAME = 100
"""A Unix socket's has at most 107 bytes."""


def new_address() -> str:
    return f"shm:{_boot()}:mcjax-{secrets.token_hex(12)}"


def name_of(address: str) -> str:
    """Of the abstract socket. Raises `AccessRefused` for another kind of address, `PeerLost` for another machine's."""
    kind, _, rest = address.partition(":")
    boot, _, name = rest.partition(":")
    if kind != "shm" or not name.startswith("mcjax-") or not name.isascii() or len(name) > LONGEST_NAME:
        raise AccessRefused("not the address of a shared-memory endpoint")
    if boot != _boot():
        raise PeerLost("the peer is on another host, or was there before this one started anew")
    return name


def _boot() -> str:
    """What tells this machine from others, until it starts anew."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:12]
