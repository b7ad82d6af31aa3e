"""Boots the guest in QEMU, always by software emulation, and gives back how its job ended.

Never by KVM: where a host offers `/dev/kvm` without hardware virtualisation behind it, a stock kernel hangs in boot.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from guest.initrd import initrd, loading_order
from guest.packages import NEEDED, Kernel

MODULES = ["virtio_pci", "9pnet_virtio", "9p", "crc32_generic", "rdma_rxe", "ib_uverbs"]
"""`crc32_generic`: soft-RoCE asks for it by name only as a device is made, so no dependency tells of it."""

_ENDED = re.compile(r"^guest: job ended with (\d+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """`status`: the job's, or None where the guest did not get that far (`why`); `console`: all that it said."""

    status: int | None
    console: str
    why: str = ""

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.console.splitlines()[-lines:])


def verdict(console: str) -> int | None:
    """Exit status of the job, as the first process wrote it; the last such line counts, for a job prints too."""
    found = _ENDED.findall(console)
    return int(found[-1]) if found else None


def boot(kernel: Kernel, job: str, folder: Path, timeout_s: float, memory_mb: int = 1536) -> Ended:
    """Run the shell script `job` in a guest; `folder` is its `/run/job`, all of this machine that it can write to.

    The guest is gone when this returns: turned off, or killed after `timeout_s`.
    """
    (folder / "job.sh").write_text(job)
    image, console = folder / "initrd", folder / "console"
    first = Path(__file__).with_name("init.sh")
    image.write_bytes(initrd(NEEDED["busybox-static"], first, loading_order(kernel.modules, MODULES)))
    why = ""
    with console.open("wb") as output:
        try:
            done = subprocess.run(
                _command(kernel, image, folder, memory_mb), stdout=output, stderr=output, timeout=timeout_s
            )
            why = "" if done.returncode == 0 else f"QEMU ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            why = f"not done after {timeout_s:.0f} s"
    said = console.read_text(errors="replace").replace("\r\n", "\n")
    return Ended(None if why else verdict(said), said, why)


def _command(kernel: Kernel, image: Path, folder: Path, memory_mb: int) -> list[str]:
    # Nehalem: an emulated AVX is half as fast as the older instructions, and NumPy needs no newer ones.
    machine = f"-machine q35 -accel tcg,thread=multi -cpu Nehalem -smp 2 -m {memory_mb} -no-reboot -nic none"
    quiet = "-nodefaults -no-user-config -display none -serial stdio -device virtio-rng-pci"
    return [
        str(NEEDED["qemu-system-x86"]),
        *shlex.split(f"{machine} {quiet}"),
        *("-kernel", str(kernel.image), "-initrd", str(image)),
        *("-append", "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off nokaslr"),
        *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"),
        *("-virtfs", f"local,path={folder},mount_tag=job,security_model=none"),
    ]
