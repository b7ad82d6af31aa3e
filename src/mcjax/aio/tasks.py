"""Tasks that somebody owns: run beside others, ended for sure, and given up when what they depend on has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

from mcjax.aio.clock import clock, new_future
from mcjax.aio.waiting import first_of, set_result

T = TypeVar("T")


async def unless(
    gone: asyncio.Future[Any],
    problem: Callable[[], Exception],
    procedure: Coroutine[Any, Any, T],
    discard: Callable[[T], None] = lambda result: None,
) -> T:
    """The result of `procedure`, run in the caller's own task; or `problem()`, as soon as `gone` is done.

    The procedure is then cancelled, and has ended when this raises; a result that it gives all the same goes to
    `discard`.
    """
    if gone.done():
        procedure.close()
        raise problem()
    task = asyncio.current_task()
    assert task is not None
    inside, interrupted = True, False

    def interrupt(_: object) -> None:
        nonlocal interrupted
        if inside:
            interrupted = True
            task.cancel()

    gone.add_done_callback(interrupt)
    try:
        result = await procedure
        if interrupted:
            discard(result)
    except BaseException as error:
        # Whoever cancels the task as well is to be obeyed: then more than our own cancellation is left.
        if interrupted and (not isinstance(error, asyncio.CancelledError) or task.cancelling() == 1):
            raise problem() from None
        raise
    else:
        if interrupted:
            raise problem()
        return result
    finally:
        inside = False
        gone.remove_done_callback(interrupt)
        if interrupted:
            task.uncancel()


def spawn(coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """A task whose owner must await or cancel it; see `Scope` for tasks that live as long as something else."""
    return clock().create_task(coroutine, name=name)


async def settle(task: asyncio.Task[Any]) -> None:
    """Cancel `task` if it still runs and wait until it has really ended; its own outcome is of no interest any more."""
    if not task.done():
        task.cancel()
    obeyed: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await _Done(task)
        except asyncio.CancelledError as cancelled:
            # Our own cancellation must not leave the child running: remember it, finish the job, then obey.
            obeyed = cancelled
    if not task.cancelled():
        task.exception()
    if obeyed is not None:
        raise obeyed


class _Done(Awaitable[None]):
    """Awaits a future's end without taking its result or cancelling it."""

    def __init__(self, future: asyncio.Future[Any]):
        self._future = future

    def __await__(self) -> Generator[Any, None, None]:
        waiter: asyncio.Future[None] = new_future()

        def wake(_: object) -> None:
            set_result(waiter, None)

        self._future.add_done_callback(wake)
        try:
            yield from waiter.__await__()
        finally:
            self._future.remove_done_callback(wake)


class Scope:
    """Tasks that live inside a block: cancelled and awaited, in the order they were spawned, when it ends.

    A child that fails ends the block: the failure is raised where the block waits (`run`), or at its end. A
    cancellation that arrives while the block ends is obeyed once every child has ended.
    """

    def __init__(self, name: str):
        self.name = name
        self._children: dict[asyncio.Task[Any], None] = {}
        self._failed: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Scope:
        self._failed = new_future()
        return self

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = spawn(coroutine, name)
        self._children[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._children.pop(task, None)
        if task.cancelled() or self._failed is None or self._failed.done():
            return
        problem = task.exception()
        if problem is not None:
            self._failed.set_exception(problem)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` to its end, unless a child of the scope fails first: then raise that failure."""
        assert self._failed is not None
        task = spawn(coroutine, f"{self.name}.body")
        try:
            await first_of([self._failed, task])
            if self._failed.done():
                await settle(task)
                self._failed.result()
            return task.result()
        finally:
            if not task.done():
                await settle(task)

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        obeyed: asyncio.CancelledError | None = None
        while self._children:  # cleaning up may spawn more
            task = next(iter(self._children))
            try:
                await settle(task)
            except asyncio.CancelledError as cancelled:
                obeyed = cancelled
            self._ended(task)
        assert self._failed is not None
        failure = self._failed.exception() if self._failed.done() else None
        if obeyed is not None:
            raise obeyed
        if failure is not None and error is None:
            raise failure
