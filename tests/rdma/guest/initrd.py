"""The guest's first file system, made in Python: an archive in cpio's `newc` format with modules in loading order.

Source of the format: the kernel's Documentation/driver-api/early-userspace/buffer-format.rst.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path

_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")


def loading_order(modules: Path, wanted: list[str]) -> list[Path]:
    """Files of the wanted modules and of all that they depend on, each after what it needs.

    Raises `KeyError` with the name of one that is not below `modules`.
    """
    files = {_plain(file.stem): file for file in sorted(modules.rglob("*.ko"))}
    order: dict[str, Path] = {}

    def add(name: str) -> None:
        if name in order:
            return
        found = _DEPENDS.search(files[name].read_bytes())
        for other in found[1].decode().split(",") if found else []:
            if other:
                add(_plain(other))
        order[name] = files[name]

    for name in wanted:
        add(_plain(name))
    return list(order.values())


def _plain(name: str) -> str:
    """The kernel takes either for the other in a module's name."""
    return name.replace("-", "_")


class Archive:
    """A cpio archive that grows. `bytes(archive)` ends it."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._count = 0

    def folder(self, name: str) -> None:
        self._add(name, stat.S_IFDIR | 0o755)

    def file(self, name: str, data: bytes, mode: int = 0o644) -> None:
        self._add(name, stat.S_IFREG | mode, data)

    def device(self, name: str, major: int, minor: int) -> None:
        """A character device."""
        self._add(name, stat.S_IFCHR | 0o600, device=(major, minor))

    def _add(self, name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        self._count += 1
        encoded = name.encode() + b"\0"
        # inode, mode, owner, group, links, time, size, device of the file (2), device that it is (2), name's length, 0
        fields = (self._count, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(encoded), 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields)
        self._parts += [_padded(header + encoded), _padded(data)]

    def __bytes__(self) -> bytes:
        self._add("TRAILER!!!", 0)
        return b"".join(self._parts)


def _padded(part: bytes) -> bytes:
    return part + bytes(-len(part) % 4)


def initrd(busybox: Path, init: Path, modules: list[Path]) -> bytes:
    """Busybox, the first process and the modules, in the order in which they are to be loaded."""
    archive = Archive()
    for name in ("bin", "dev", "modules", "proc", "host", "sys"):
        archive.folder(name)
    archive.device("dev/console", 5, 1)
    archive.file("bin/busybox", busybox.read_bytes(), 0o755)
    archive.file("init", init.read_bytes(), 0o755)
    for module in modules:
        archive.file(f"modules/{module.name}", module.read_bytes())
    archive.file("modules/order", "".join(f"{module.name}\n" for module in modules).encode())
    return bytes(archive)
