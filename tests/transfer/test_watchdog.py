"""Deadlines of batches: late ones are told, once, and nobody else is."""

from __future__ import annotations

import threading

import pytest

from mcjax.transfer.transports.watchdog import Watchdog

PATIENCE_S = 20.0


def test_what_is_not_ended_is_called_in_order_of_its_deadline() -> None:
    watchdog, called, done = Watchdog("test"), [], threading.Event()
    for name, seconds in (("c", 0.06), ("a", 0.0), ("b", 0.03)):
        watchdog.watch(seconds, lambda name=name: called.append(name))
    watchdog.watch(0.09, done.set)
    assert done.wait(PATIENCE_S)
    assert called == ["a", "b", "c"]
    watchdog.close()


def test_what_was_ended_is_not_called() -> None:
    watchdog, called, done = Watchdog("test"), [], threading.Event()
    numbers = [watchdog.watch(0.02, lambda: called.append(1)) for _ in range(200)]
    for number in numbers:
        watchdog.end(number)
        watchdog.end(number)
    watchdog.watch(0.04, done.set)
    assert done.wait(PATIENCE_S)
    assert not called
    watchdog.close()


def test_ended_watches_do_not_pile_up() -> None:
    watchdog = Watchdog("test")
    for _ in range(5000):
        watchdog.end(watchdog.watch(1000.0, threading.Event().set))
    assert len(watchdog._due) < 200
    watchdog.close()


def test_closing_ends_the_thread_and_calls_nobody() -> None:
    watchdog, called = Watchdog("a watchdog of a test"), []
    watchdog.watch(0.2, lambda: called.append(1))
    watchdog.close()
    assert not called
    assert "a watchdog of a test" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="closed"):
        watchdog.watch(1.0, lambda: None)


def test_a_callback_may_close_it() -> None:
    watchdog, done = Watchdog("test"), threading.Event()

    def late() -> None:
        watchdog.close()
        done.set()

    watchdog.watch(0.0, late)
    assert done.wait(PATIENCE_S)
