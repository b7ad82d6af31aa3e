"""A worker process: hosts one instance, obeys its controller, and does not outlive it.

Started as `python -m mcjax.backends.processes.worker DESCRIPTOR`, its end of a socket. The first message says what to
host, and brings the run's secret: neither ever is in the command line or the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from mcjax.backends.processes.frames import FrameBroken, Frames, Message, encode
from mcjax.errors import McjaxError
from mcjax.transfer.transports.secret import Secret

CHUNK_BYTES = 1 << 18
PR_SET_PDEATHSIG = 1


class Line:
    """The worker's end of the socket. Whatever is wrong with it ends the process: there is nobody to work for."""

    def __init__(self, theirs: socket.socket):
        self._socket = theirs
        self._lock = threading.Lock()
        self._frames = Frames()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: str, values: Mapping[str, Any]) -> None:
        """Thread-safe. Waits while the controller does not read."""
        try:
            frame = encode(Message(kind, values))
            with self._lock:
                self._socket.sendall(frame)
        except OSError:
            os._exit(1)

    def first(self) -> Message:
        """Wait for the first message."""
        found: list[Message] = []
        while not found:
            found = self._read(0)
        return found[0]

    def arrived(self) -> list[Message]:
        """The messages that have come since."""
        with contextlib.suppress(BlockingIOError):
            return self._read(socket.MSG_DONTWAIT)
        return []

    def _read(self, flags: int) -> list[Message]:
        try:
            piece = self._socket.recv(CHUNK_BYTES, flags)
            if piece:
                return self._frames.feed(piece)
        except BlockingIOError:
            raise
        except (OSError, FrameBroken):
            pass
        os._exit(1)

    def beat(self, period_s: float) -> None:
        """Say from time to time that this process runs, from a thread of its own, whatever else it is busy with."""
        threading.Thread(target=self._beat, args=(period_s,), name="mcjax-beat", daemon=True).start()

    def _beat(self, period_s: float) -> None:
        while True:
            self.send("beat", {})
            time.sleep(period_s)


def end_with_parent() -> None:
    """Have the system kill this process when the thread that started it ends. Where it is not Linux, the end of the
    socket does it, a little later."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def serve(line: Line) -> None:
    """Host what the first message says until the last one."""
    start = line.first()
    config, secret = start.values, Secret(start.buffers[0])
    line.beat(config["beat_s"])
    try:
        # It imports JAX, which takes seconds: the beat was to be heard first.
        from mcjax.backends.processes.hosted import Hosted

        hosted = Hosted(config, secret, line.send)

        async def main() -> None:
            line.send("ready", await hosted.prepare())
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def obey() -> None:
                try:
                    for message in line.arrived():
                        if message.kind == "end":
                            ended.set_result(None)
                            return
                        hosted.obey(message)
                except Exception as problem:
                    if not ended.done():
                        ended.set_exception(problem)

            loop = asyncio.get_running_loop()
            loop.add_reader(line.fileno(), obey)
            try:
                await ended
            finally:
                loop.remove_reader(line.fileno())
                hosted.close()
                await hosted.world.close()

        hosted.world.run(main)
    except McjaxError as problem:
        line.send("refused", {"why": str(problem)})
        sys.exit(2)


def main(descriptor: int) -> None:
    end_with_parent()
    os.set_inheritable(descriptor, False)
    serve(Line(socket.socket(fileno=descriptor)))
    sys.stdout.flush()
    os._exit(0)  # all is closed; what libraries do at their exit takes longer than that


if __name__ == "__main__":
    main(int(sys.argv[1]))
