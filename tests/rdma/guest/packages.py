"""What the guest is made of: Debian's generic kernel, fetched but never installed, and which packages the host lacks.

The kernel's build changes with every update, so its name is asked of apt; files that the guest needs are taken out of
the package, 13 of 400 MB.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")

NEEDED = {
    "qemu-system-x86": Path("/usr/bin/qemu-system-x86_64"),
    "busybox-static": Path("/bin/busybox"),
    "iproute2": Path("/usr/bin/rdma"),
    "ibverbs-providers": Path("/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so"),
    "python3-pyverbs": PYVERBS,
}
"""Package -> a file of it. The kernel's provider library has a number of its own in every release of rdma-core, so the
folder is looked at where this very file is not there."""

_MODULES = (
    "kernel/drivers/virtio kernel/net/9p kernel/fs/9p kernel/fs/netfs kernel/fs/fscache kernel/drivers/infiniband/core "
    "kernel/drivers/infiniband/sw kernel/net/ipv4/udp_tunnel.ko kernel/net/ipv6/ip6_udp_tunnel.ko "
    "kernel/crypto/crc32_generic.ko"
).split()
_TIMEOUT_S = 120


class NoGuest(Exception):
    """There can be no guest on this machine. Says why."""


@dataclass(frozen=True)
class Kernel:
    """`image`: what QEMU boots; `modules`: the root of its modules' folder; `release`: as `uname -r` says it."""

    image: Path
    modules: Path
    release: str


def missing() -> str:
    """Why no guest can be made here, or nothing. Changes nothing and asks no network."""
    if os.geteuid() != 0:
        return "the guest reads the host's files as root, and this is not root"
    if not shutil.which("apt-get"):
        return "the guest is made of Debian packages, and there is no apt-get"
    absent = [package for package, file in NEEDED.items() if not _there(file)]
    return f"not installed: {' '.join(absent)}" if absent else ""


def _there(file: Path) -> bool:
    return file.exists() or any(file.parent.glob("librxe-*")) if file.name.startswith("librxe") else file.exists()


def kernel() -> Kernel:
    """The newest generic kernel that apt knows, from the cache of an earlier call or fetched now.

    Raises `NoGuest` if apt has none or cannot fetch it.
    """
    name = _dependency("linux-image-amd64")
    release = name.removeprefix("linux-image-")
    place = _cache() / release
    if not place.is_dir():
        with tempfile.TemporaryDirectory(dir=_cache()) as scratch:
            folder = Path(scratch)
            # `_apt` may not enter root's folder; apt then says so and fetches as root.
            _run(["apt-get", "download", "-qq", name], folder)
            (package,) = folder.glob("*.deb")
            _extract(package, release, folder / "files")
            (folder / "files").rename(place)
    return Kernel(place / "boot" / f"vmlinuz-{release}", place / "lib" / "modules" / release, release)


def _dependency(name: str) -> str:
    for line in _run(["apt-cache", "depends", name], Path("/")).splitlines():
        kind, _, value = line.strip().partition(": ")
        if kind == "Depends" and value.startswith("linux-image-"):
            return value
    raise NoGuest(f"apt knows no {name}; `apt-get update` may help")


def _cache() -> Path:
    """A folder of root's own that later runs find again."""
    folder = Path(tempfile.gettempdir()) / "mcjax-soft-roce"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise NoGuest(f"{folder} belongs to somebody else")
    return folder


def _extract(package: Path, release: str, target: Path) -> None:
    target.mkdir()
    wanted = [f"./lib/modules/{release}/{path}" for path in _MODULES]
    with subprocess.Popen(["dpkg", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as archive:
        command = ["tar", "-x", "-C", str(target), f"./boot/vmlinuz-{release}", *wanted]
        subprocess.run(command, stdin=archive.stdout, check=True, timeout=_TIMEOUT_S)


def _run(command: list[str], folder: Path) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise NoGuest(f"{' '.join(command)}: {problem}") from None
    if done.returncode:
        raise NoGuest(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
    return done.stdout
