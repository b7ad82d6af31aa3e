"""Work on a thread of its own that Ctrl-C still reaches."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def on_thread(work: Callable[[], T]) -> T:
    """The result of `work()`, run on a thread while this one waits. Ctrl-C is raised in `work`."""
    outcome: dict[str, Any] = {}
    ended = threading.Event()

    def body() -> None:
        try:
            outcome["result"] = work()
        except BaseException as problem:
            outcome["problem"] = problem
        finally:
            ended.set()

    thread = threading.Thread(target=body, name="mcjax.run")
    with _plain_interrupts():
        thread.start()
        waiting = True
        while waiting:
            try:
                # Not `join`: when interrupted, that of Python 3.11 takes the thread for ended.
                waiting = not ended.wait(0.2) and thread.is_alive()
            except KeyboardInterrupt:
                identity, error = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, error)
    if "result" in outcome:
        return outcome["result"]
    raise outcome.get("problem") or KeyboardInterrupt  # it came when `work` had ended already


@contextlib.contextmanager
def _plain_interrupts() -> Generator[None, None, None]:
    """Ctrl-C raises KeyboardInterrupt here: `asyncio.run` would only cancel a task, which cannot run while we wait."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
