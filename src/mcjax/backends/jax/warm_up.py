"""What an executor will run, so that all of it is compiled, and has run once, before the first request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mcjax.backends.jax.plans import Plan

if TYPE_CHECKING:
    from mcjax.backends.jax.executor import JaxExecutor

Job = Callable[[], object]


def warm_up_jobs(executor: JaxExecutor, prefill: bool, decode: bool) -> list[tuple[str, Job]]:
    """`(program, job)`, each to be run on the executor's thread; they touch the scratch page only.

    Every shape is here: a program that is missing would be compiled while requests wait.
    """
    geometry = executor.geometry
    calls: list[tuple[str, int, int]] = []
    if prefill:
        calls += [(f"prefill of {width}", 1, width) for width in geometry.widths]
    if decode:
        calls += [(f"decode of {batch}", batch, 1) for batch in geometry.batches]

    def step(batch: int, width: int) -> Job:
        return lambda: [executor.step(Plan.idle(geometry, batch, width, full)) for full in (False, True)]

    scratch = [geometry.pages]

    def move() -> None:
        executor.write_pages(scratch, executor.read_pages(scratch))
        executor.copy_pages(scratch, scratch)

    def fused(batch: int) -> Job:
        return lambda: executor.steps(Plan.idle(geometry, batch, 1))

    together = geometry.fused_steps
    batches = geometry.batches if decode and together > 1 else ()
    many = [(f"{together} decodes of {batch}", fused(batch)) for batch in batches]
    return [("page copies", move), *((name, step(batch, width)) for name, batch, width in calls), *many]
