"""The thread of an RDMA endpoint: what it calls, in which order, and what it no longer calls."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from mcjax.transfer.transports.rdma.loop import Loop

WAIT_S = 30


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop("mcjax-rdma-test", lambda: None)
    yield loop
    loop.stop()


def test_what_is_handed_over_is_called_in_order(loop: Loop) -> None:
    called: list[int] = []
    for number in range(100):
        loop.call(lambda number=number: called.append(number))
    assert loop.start(lambda: list(called)).result(WAIT_S) == list(range(100))


def test_what_it_raises_is_told_and_ends_nothing(loop: Loop) -> None:
    with pytest.raises(ZeroDivisionError):
        loop.start(lambda: 1 // 0).result(WAIT_S)
    loop.call(lambda: 1 // 0)
    assert loop.start(lambda: 7).result(WAIT_S) == 7


def test_on_the_thread_itself_nothing_is_waited_for(loop: Loop) -> None:
    assert loop.start(lambda: loop.start(lambda: threading.current_thread().name).result(0)).result(WAIT_S)


def test_what_was_closed_in_the_same_round_is_not_called(loop: Loop) -> None:
    """Both descriptors are ready; whoever is called first closes the other, whose library would not bear a call."""
    called: list[str] = []
    pairs = {name: socket.socketpair() for name in "ab"}
    done = threading.Event()

    def ready(name: str, other: str) -> Callable[[int], None]:
        def call(events: int) -> None:
            called.append(name)
            loop.forget(pairs[name][0])
            loop.forget(pairs[other][0])
            pairs[other][0].close()
            done.set()

        return call

    def begin() -> None:
        loop.watch(pairs["a"][0], selectors.EVENT_READ, ready("a", "b"))
        loop.watch(pairs["b"][0], selectors.EVENT_READ, ready("b", "a"))
        for _, far in pairs.values():
            far.send(b"x")

    loop.call(begin)
    assert done.wait(WAIT_S)
    assert loop.start(lambda: len(called)).result(WAIT_S) == 1
    for near, far in pairs.values():
        near.close()
        far.close()


def test_nothing_is_left_of_it() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        Loop("mcjax-rdma-test", lambda: 1000.0).stop()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "mcjax-rdma-test"]
