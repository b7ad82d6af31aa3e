"""Time on the device: many calls inside one program, so that no launch from the host is among them."""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

MOST_CALLS = 2000
WARM_UP = 2


@dataclass
class Loop:
    """A call as the body of a loop: `body(state, constants, index)` gives the next state, which it depends on."""

    body: Callable[[Any, Any, Any], Any]
    state: Any
    constants: Any
    calls: int = 1
    """Of the kernel in one turn of the body."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median over programs, the least and the most; and how many calls a program makes."""

    seconds: float
    least_s: float
    most_s: float
    calls: int
    busy: float | None = None
    """Share of a program's time in which, by the device's events, a kernel ran. None: not asked, or there are none."""


def timed(loop: Loop, expected_s: float, program_s: float, rounds: int, events: bool = False) -> Timing:
    """`rounds` programs of as many calls as should take `program_s` if each takes `expected_s`. Uses the state up."""
    turns = max(1, min(MOST_CALLS, int(program_s / max(expected_s, 1e-9))) // loop.calls)
    run = jax.jit(functools.partial(_turns, loop.body, turns), donate_argnums=0)
    compiled = run.lower(loop.state, loop.constants).compile()
    seconds: list[float] = []
    busy = None
    for number in range(WARM_UP + rounds):
        start_s = time.perf_counter()
        loop.state = jax.block_until_ready(compiled(loop.state, loop.constants))
        if number >= WARM_UP:
            seconds.append((time.perf_counter() - start_s) / (turns * loop.calls))
    if events:
        busy = _busy(lambda: _step(loop, compiled))
    return Timing(statistics.median(seconds), min(seconds), max(seconds), turns * loop.calls, busy)


def _turns(body: Callable[[Any, Any, Any], Any], turns: int, state: Any, constants: Any) -> Any:
    return lax.fori_loop(0, turns, lambda index, held: body(held, constants, index), state)


def _step(loop: Loop, compiled: Any) -> None:
    loop.state = jax.block_until_ready(compiled(loop.state, loop.constants))


def _busy(step: Callable[[], None]) -> float | None:
    """Sum of the device's events over the time from the first to the last of them."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step()
        events = [event for path in Path(folder).rglob("*.xplane.pb") for event in _kernels(path)]
    if not events:
        return None
    begin, end = min(start for start, _ in events), max(start + length for start, length in events)
    return sum(length for _, length in events) / (end - begin)


def _kernels(path: Path) -> Iterator[tuple[float, float]]:
    """Start and duration, nanoseconds, of what ran on the first device's streams."""
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if plane.name == "/device:GPU:0":
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    yield from ((event.start_ns, event.duration_ns) for event in line.events)


def empty_loop() -> Loop:
    """What a turn of a loop takes by itself."""
    return Loop(lambda state, constants, index: jnp.maximum(state, index % constants), jnp.int32(0), jnp.int32(7))


def copy_loop(nbytes: int) -> Loop:
    """Reads and writes `nbytes` each."""
    return Loop(lambda state, _, __: state + 1, jnp.zeros(nbytes // 4, jnp.int32), None)


def matmul_loop(side: int, dtype: str) -> Loop:
    """A product of square matrices, summed in float32, over and over."""

    def body(state: Any, constants: Any, _: Any) -> Any:
        product = jnp.matmul(state, constants, preferred_element_type=jnp.float32)
        return (product * (1 / side)).astype(dtype)

    one = jnp.ones((side, side), dtype)
    return Loop(body, one, one + 0)
