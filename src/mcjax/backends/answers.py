"""How answers from other threads reach the loop, and how they are awaited. Free of jax."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from mcjax import aio


def post(clock: aio.Clock, callback: Callable[..., object], *args: Any) -> None:
    """Make `callback(*args)` a wake-up of the clock's loop; nothing if that has closed, since nobody is left then."""
    with contextlib.suppress(RuntimeError):
        clock.post(callback, *args)


async def finished(future: asyncio.Future[Any], hurry: Callable[[], None]) -> Any:
    """The future's result. Cancelling does not leave early: `hurry()` is called, and the end awaited, first."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await aio.first_of([future])
        except asyncio.CancelledError as request:
            cancelled = request
            hurry()
    if cancelled is not None:
        future.exception()
        raise cancelled
    return future.result()
