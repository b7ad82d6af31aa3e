"""The slow link itself, and the real engine over it, with streaming and without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Module = Callable[[str], ModuleType]

SERVER = """
import socket
listener = socket.create_server(("0.0.0.0", 5000))
print("up", flush=True)
connection, _ = listener.accept()
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
connection.sendall(connection.recv(1))
left, room = int(connection.recv(20)), bytearray(1 << 20)
connection.sendall(b"!")
while left:
    left -= connection.recv_into(room)
connection.sendall(b".")
"""

CLIENT = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
start = time.perf_counter()
connection.sendall(b"?"); connection.recv(1)
print(time.perf_counter() - start)
connection.sendall(sys.argv[2].encode()); connection.recv(1)
start = time.perf_counter()
connection.sendall(bytes(int(sys.argv[2]))); connection.recv(1)
print(time.perf_counter() - start)
"""


@pytest.fixture
def script(module: Module) -> Any:
    return module("slow_link")


@pytest.fixture
def network(module: Module) -> Any:
    """The module that makes links, where that can be."""
    made = module("slow_link_network")
    if problem := made.missing():
        pytest.skip(problem)
    return made


def namespaces(owner: int) -> list[str]:
    """Those that a process has made and that are still there."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in listed.stdout.splitlines()]
    return [name for name in names if name.startswith(f"mcjax-{owner}-")]


def ping_and_send(link: Any, nbytes: int) -> tuple[float, float]:
    """Seconds of a round trip and of so many bytes over one connection."""
    with subprocess.Popen([*link.command("b"), sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        client = [*link.command("a"), sys.executable, "-c", CLIENT, link.address("b"), str(nbytes)]
        told = subprocess.run(client, capture_output=True, text=True, check=True, timeout=60)
    round_s, bytes_s = map(float, told.stdout.split())
    return round_s, bytes_s


@pytest.mark.network
@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_it_is_as_slow_and_as_long_as_asked(network: Any, delay_s: float) -> None:
    """Bounds from below: a busy machine may be slower, and nothing here is faster."""
    nbytes = 4 << 20
    with network.slow_link(100e6, delay_s) as link:
        assert len(namespaces(os.getpid())) == 3
        before = link.sent_bytes("a"), link.sent_bytes("b")
        round_s, bytes_s = ping_and_send(link, nbytes)
        sent = link.sent_bytes("a") - before[0], link.sent_bytes("b") - before[1]
    assert round_s >= 2 * delay_s
    assert bytes_s >= 0.9 * nbytes * 8 / 100e6
    assert nbytes < sent[0] < 1.2 * nbytes
    assert sent[1] < nbytes / 4
    assert not namespaces(os.getpid())


@pytest.mark.network
def test_nothing_is_left_of_it_when_its_owner_is_killed(network: Any) -> None:
    owner = "from slow_link_network import slow_link\nwith slow_link(1e8, 0.01):\n print('up', flush=True)\n input()"
    folder = Path(network.__file__).parent
    with subprocess.Popen(
        [sys.executable, "-c", owner], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(namespaces(process.pid)) == 3
        process.send_signal(signal.SIGKILL)
    end_s = time.monotonic() + 20
    while namespaces(process.pid) and time.monotonic() < end_s:
        time.sleep(0.1)
    assert not namespaces(process.pid)


@pytest.mark.network
@pytest.mark.timeout(600)
def test_streaming_hides_the_transfer_and_changes_no_token(script: Any, network: Any, tmp_path: Path) -> None:
    prompts = script.Prompts(tokens=3072, count=4, every_s=3.0, burst=2)
    bits_per_s = 100e6
    embedded = script.play(prompts, True, None, tmp_path)
    streaming, at_once = script.compare(bits_per_s, 0.002, prompts, tmp_path)
    assert streaming.tokens == at_once.tokens == embedded.tokens
    assert all(len(output) == 8 for output in embedded.tokens)
    prompt_bytes = script.prompt_bytes(prompts)
    for played in (streaming, at_once):
        assert 6 * prompt_bytes < played.sent_bytes < 1.2 * (6 + 10) * prompt_bytes
    assert streaming.early_share > 0
    assert at_once.early_share == 0
    # The best of three, since others may be at work here: without streaming none can be faster than the link is.
    assert min(at_once.handed_over_s) >= 0.9 * prompt_bytes * 8 / bits_per_s
    assert min(streaming.handed_over_s) < min(at_once.handed_over_s)


def test_what_arrived_before_the_first_token_is_counted(script: Any) -> None:
    def event(kind: str, tier: str, time_ns: int, nbytes: int) -> dict[str, object]:
        return {"kind": kind, "tier": tier, "request_id": 1, "time_ns": time_ns, "bytes": nbytes}

    events = [
        event("transfer", "dram>dram", 10, 100),
        event("transfer", "dram>dram", 20, 300),
        event("transfer", "hbm>dram", 5, 1000),
        event("transfer_failed", "dram>dram", 5, 1000),
    ]
    assert script.early_share(events, {1: 10}) == 0.25
    assert script.early_share(events, {2: 10}) == 0.0


def results() -> dict[str, object]:
    def played(streaming: bool, rest_s: float) -> dict[str, object]:
        each = {"prompt_s": [1.0, 2.0, 0.5], "ttft_s": [1.1, 2.1, 0.6], "handed_over_s": [rest_s] * 3}
        each["burst_ttft_s"] = [2 * rest_s, rest_s]
        return {"streaming": streaming, "early_share": 0.9, **each}

    links = [
        {"bits_per_s": bits, "played": [played(False, 8e8 / bits), played(True, 1e8 / bits)]} for bits in (4e8, 1e8)
    ]
    prompts = {"tokens": 3072, "count": 6, "every_s": 4.0, "burst": 2}
    return {"links": links, "prompt_bytes": 12_500_000, "prompts": prompts}


def test_table_and_plot(script: Any, tmp_path: Path) -> None:
    lines = script.shown(results()).splitlines()
    lone = "| 100 | 1.00 | 1.00 (0.50) | 1.10 (0.60) | 1.10 (0.60) | 1.00 (1.00) | 8.00 (8.00) | 90% |"
    assert lines[2].startswith(f"{lone} 1.00, 2.00 | 8.00, 16.00 |")
    assert lines[3].startswith("| 400 | 0.25 |")
    script.draw(results(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
