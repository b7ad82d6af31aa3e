"""Peers for the guest, forked from a process that has imported everything: there a Python of its own takes many seconds
to start.

As a plugin of pytest (`-p nursery`) it has `endpoint_peer.Peer` get its process here. As a script it is that process:
for each order over its socket it forks, and the child goes on as `endpoint_peer` would.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mcjax.transfer.transports.rdma.library import load

_TESTS = Path(__file__).resolve().parents[2] / "transfer"


class Forked:
    """What a `Peer` needs of `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: int, stdout: int):
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb")
        self.stdout = os.fdopen(stdout, "rb")
        self._process = os.pidfd_open(pid)

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._process, number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> None:
        """Until it has ended."""
        if not select.select([self._process], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired("peer", timeout_s or 0.0)

    def __del__(self) -> None:
        os.close(self._process)


class Nursery:
    """The parent's side."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            command = [sys.executable, __file__, str(other.fileno())]
            paths = os.pathsep.join([str(_TESTS), *(path for path in sys.path if path)])
            environment = {**os.environ, "PYTHONPATH": paths}
            self._process = subprocess.Popen(command, pass_fds=[other.fileno()], env=environment)

    def start(self, kind: str, environment: dict[str, str]) -> Forked:
        (orders, write), (read, answers) = os.pipe(), os.pipe()
        order = json.dumps({"kind": kind, "environment": environment}).encode()
        socket.send_fds(self._socket, [order], [orders, answers])
        os.close(orders)
        os.close(answers)
        return Forked(int(self._socket.recv(100)), write, read)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def pytest_configure(config: pytest.Config) -> None:
    sys.path.insert(0, str(_TESTS))
    endpoint_peer = importlib.import_module("endpoint_peer")
    nursery = Nursery()
    config.add_cleanup(nursery.close)

    def start(peer: Any, kind: str, secret: Any, environment: dict[str, str] | None = None) -> None:
        hidden = {endpoint_peer.VARIABLE: secret.hand_over().hex()}
        peer.process = nursery.start(kind, {**hidden, **(environment or {})})

    endpoint_peer.Peer.__init__ = start


def _serve(orders: socket.socket) -> None:
    endpoint_peer = importlib.import_module("endpoint_peer")
    for slow in ("endpoint_kinds", "numpy.random", "mcjax.transfer.transports.rdma", "mcjax.kvpool.stores.slab"):
        importlib.import_module(slow)
    load()
    # Nobody waits for the children: the kernel forgets them as they end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, pipes, _, _ = socket.recv_fds(orders, 1 << 16, 2)
        if not message:
            return
        order = json.loads(message)
        pid = os.fork()
        if not pid:
            orders.close()
            _become(endpoint_peer, order, *pipes)
        for pipe in pipes:
            os.close(pipe)
        orders.send(str(pid).encode())


def _become(endpoint_peer: Any, order: dict[str, Any], stdin: int, stdout: int) -> NoReturn:
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.close(stdin)
        os.close(stdout)
        os.environ.update(order["environment"])
        endpoint_peer._main(order["kind"])
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
