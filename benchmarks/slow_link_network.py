"""Two network namespaces and a slow link between them: `tc tbf` for bandwidth, a delay line for distance.

Needs Linux, root, `ip` and `tc`. What is made here is unmade at any exit: a keeper process holds one end of a pipe, and
takes all of it away when the other end closes, whether its owner returned, raised, or was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SIDES = ("a", "b")
DEVICE = "link0"
"""The end of the link in either namespace."""
BURST_BYTES = 128 << 10
"""What goes at full speed after a pause; a few milliseconds of a link of a few hundred megabits."""


class LinkUnavailable(RuntimeError):
    """No namespaces here. Says what is missing."""


def missing() -> str:
    """Why there can be no slow link here, or nothing."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if _tool(tool) is None:
            return f"{tool} is missing (apt-get install iproute2)"
    return ""


@dataclass(frozen=True)
class Link:
    """A link that is there. `sides`: namespaces by the names `a` and `b`."""

    sides: dict[str, str]
    bits_per_s: float
    delay_s: float

    def command(self, side: str) -> list[str]:
        """What goes in front of a command to run it on that side."""
        return [str(_tool("ip")), "netns", "exec", self.sides[side]]

    def address(self, side: str) -> str:
        return f"10.77.0.{SIDES.index(side) + 1}"

    def sent_bytes(self, side: str) -> int:
        """What has gone over the link from that side, headers and all, as its interface counted."""
        path = f"/sys/class/net/{DEVICE}/statistics/tx_bytes"
        return int(subprocess.run([*self.command(side), "cat", path], check=True, capture_output=True).stdout)


@contextlib.contextmanager
def slow_link(bits_per_s: float, delay_s: float = 0.0) -> Iterator[Link]:
    """Two namespaces joined by a link of that bandwidth, and of that delay in each direction. Raises
    `LinkUnavailable`."""
    if problem := missing():
        raise LinkUnavailable(problem)
    names = {side: f"mcjax-{os.getpid()}-{side}" for side in (*SIDES, "line")}
    with _keeper(list(names.values())):
        for name in names.values():
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "dev", "lo", "up")
        if delay_s:
            for side in SIDES:
                _ip(
                    "link",
                    "add",
                    DEVICE,
                    "netns",
                    names[side],
                    "type",
                    "veth",
                    "peer",
                    "name",
                    side,
                    "netns",
                    names["line"],
                )
                _ip("-n", names["line"], "link", "set", "dev", side, "up")
        else:
            ends = (DEVICE, "netns", names["a"], "type", "veth", "peer", "name", DEVICE, "netns", names["b"])
            _ip("link", "add", *ends)
        link = Link({side: names[side] for side in SIDES}, bits_per_s, delay_s)
        for side in SIDES:
            _ip("-n", names[side], "addr", "add", f"{link.address(side)}/24", "dev", DEVICE)
            _ip("-n", names[side], "link", "set", "dev", DEVICE, "up")
            rate = (f"{bits_per_s:.0f}bit", "burst", f"{BURST_BYTES}", "latency", "200ms")
            _run([*link.command(side), str(_tool("tc")), "qdisc", "add", "dev", DEVICE, "root", "tbf", "rate", *rate])
        with _delay_line(names["line"], delay_s) if delay_s else contextlib.nullcontext():
            yield link


@contextlib.contextmanager
def _delay_line(namespace: str, delay_s: float) -> Iterator[None]:
    script = Path(__file__).with_name("slow_link_delay.py")
    command = [str(_tool("ip")), "netns", "exec", namespace, sys.executable, str(script), *SIDES, f"{delay_s * 1000:g}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as line:
        assert line.stdout is not None
        if line.stdout.readline() != b"ready\n":
            raise LinkUnavailable("the delay line did not come up")
        try:
            yield
        finally:
            line.kill()


@contextlib.contextmanager
def _keeper(names: list[str]) -> Iterator[None]:
    """A process of its own session that deletes the namespaces when this one is gone."""
    command = [sys.executable, __file__, "keep", *names]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield  # leaving the block closes the pipe and waits


def _keep(names: list[str]) -> None:
    sys.stdin.read()
    for name in names:
        found = subprocess.run([str(_tool("ip")), "netns", "pids", name], capture_output=True, text=True, check=False)
        for process in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), 9)
        subprocess.run([str(_tool("ip")), "netns", "del", name], capture_output=True, check=False)


def _tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _ip(*arguments: str) -> None:
    _run([str(_tool("ip")), *arguments])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkUnavailable(f"{' '.join(command[1:])}: {done.stderr.strip()}")


if __name__ == "__main__":
    _keep(sys.argv[2:])
