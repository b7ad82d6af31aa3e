"""Async tests that run on both loops, the virtual one and a stock one."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop

MS = 1_000_000

Run = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]


def virtual(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return VirtualLoop().run(main)


def real(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), 20))


def on_both(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on both loops."""

    @pytest.mark.parametrize("run", [virtual, real], ids=["virtual", "real"])
    @functools.wraps(test)
    def wrapper(run: Run, **arguments: Any) -> None:
        run(lambda: test(**arguments))

    own = inspect.signature(test)
    loop = inspect.Parameter("run", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wrapper.__signature__ = own.replace(parameters=[loop, *own.parameters.values()])  # pyright: ignore[reportAttributeAccessIssue]
    return wrapper


async def instant() -> None:
    """One wake-up later: everything that was runnable has run."""
    await aio.sleep_ns(0)


def pending() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()
