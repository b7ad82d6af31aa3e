"""A delay line: carries frames between two network interfaces, each so many milliseconds later.

`python benchmarks/slow_link_delay.py FIRST SECOND DELAY_MS`, as root, in the namespace that has both. For kernels
without `netem`. Frames go as they are, large segments unsplit, so that a link of a gigabit costs little of a processor.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections import deque

SOL_PACKET, PACKET_IGNORE_OUTGOING, PACKET_VNET_HDR = 263, 23, 15  # linux/if_packet.h; not in `socket`
ETH_P_ALL = 3
LARGEST_BYTES = 80 << 10
"""Of a frame that is yet to be segmented, with its header."""
QUEUED_BYTES = 64 << 20
"""On the line in one direction; what comes beyond is lost, as with any queue."""


class Direction:
    """Frames from one interface to another."""

    def __init__(self, source: socket.socket, target: socket.socket, delay_s: float):
        self.source, self.target, self.delay_s = source, target, delay_s
        self.waiting: deque[tuple[float, bytes]] = deque()
        self.waiting_bytes = 0
        self.lost = 0

    def take(self, now_s: float) -> None:
        """All that has arrived."""
        while True:
            try:
                frame = self.source.recv(LARGEST_BYTES)
            except BlockingIOError:
                return
            if self.waiting_bytes + len(frame) > QUEUED_BYTES:
                self.lost += 1
                continue
            self.waiting.append((now_s + self.delay_s, frame))
            self.waiting_bytes += len(frame)

    def give(self, now_s: float) -> None:
        """All that is due."""
        while self.waiting and self.waiting[0][0] <= now_s:
            _, frame = self.waiting.popleft()
            self.waiting_bytes -= len(frame)
            try:
                self.target.send(frame)
            except OSError:  # the interface is full or gone: a lost frame, which TCP sends again
                self.lost += 1


def interface(name: str) -> socket.socket:
    """A socket that sees every frame that arrives, each behind its virtio header (checksum and segmentation state)."""
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    for option in (PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING):
        raw.setsockopt(SOL_PACKET, option, 1)
    for option in (33, 32):  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
        raw.setsockopt(socket.SOL_SOCKET, option, 32 << 20)
    raw.bind((name, 0))
    raw.setblocking(False)
    return raw


def main(first: str, second: str, delay_ms: str) -> None:
    ends = interface(first), interface(second)
    delay_s = float(delay_ms) / 1000
    directions = [Direction(ends[0], ends[1], delay_s), Direction(ends[1], ends[0], delay_s)]
    print("ready", flush=True)
    while True:
        now_s = time.monotonic()
        due = [direction.waiting[0][0] for direction in directions if direction.waiting]
        patience_s = max(0.0, min(due) - now_s) if due else None
        select.select(ends, (), (), patience_s)
        now_s = time.monotonic()
        for direction in directions:
            direction.take(now_s)
            direction.give(now_s)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
