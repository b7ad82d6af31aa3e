"""`overhead`: where the time of a batch of 8 being decoded goes: device, dispatch, and Python of our own.

The engine runs as it always does; the benchmark times its calls. What is neither in a dispatch nor in the wait for a
step's tokens, from the first step of the full batch to the last, is ours.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from measure import say
from profiled_run import named

BATCH = 8
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
MODELS = {"smollm2": "model=smollm2", "tiny": "model=tiny"}


@dataclass(slots=True)
class Step:
    """One step on the executor's thread, in nanoseconds."""

    rows: int
    width: int
    start_ns: int
    end_ns: int = 0
    dispatch_ns: int = 0


@dataclass
class Watch:
    """Times every step of every executor while it is `on`."""

    steps: list[Step] = field(default_factory=list)

    def on(self) -> Callable[[], None]:
        """Begin; returns what ends it."""
        from mcjax.backends.jax.executor import JaxExecutor
        from mcjax.backends.jax.programs import DevicePrograms

        originals = [
            (JaxExecutor, "step"),
            *((DevicePrograms, name) for name in ("model", "sampler", "full_sampler")),
        ]
        kept = [(owner, name, getattr(owner, name)) for owner, name in originals]
        step = JaxExecutor.step

        def timed_step(executor: Any, call: Any) -> Any:
            self.steps.append(Step(len(call.indices), call.width, time.perf_counter_ns()))
            answer = step(executor, call)
            self.steps[-1].end_ns = time.perf_counter_ns()
            return answer

        def timed(make: Callable[..., Any]) -> Callable[..., Any]:
            def program(programs: Any, *shape: int) -> Callable[..., Any]:
                compiled = make(programs, *shape)

                def dispatch(*arguments: Any) -> Any:
                    start_ns = time.perf_counter_ns()
                    answer = compiled(*arguments)
                    self.steps[-1].dispatch_ns += time.perf_counter_ns() - start_ns
                    return answer

                return dispatch

            return program

        setattr(JaxExecutor, "step", timed_step)  # noqa: B010
        for owner, name, function in kept[1:]:
            setattr(owner, name, timed(function))

        def off() -> None:
            for owner, name, function in kept:
                setattr(owner, name, function)

        return off


class _Session:
    """One request; its answer is the end."""

    start_ns = 0

    def __init__(self, turn: Any, ended: Callable[[], None]):
        self._turn = turn
        self._ended = ended

    def next_turn(self, answer: Any) -> Any:
        turn, self._turn = self._turn, None
        if turn is None:
            self._ended()
        return turn


class Fixed:
    """`BATCH` prompts of random tokens at once, each with an output of fixed length.

    `profile`, if any, runs from the first request to the last answer, on the event loop's thread.
    """

    name = "fixed"
    block_tokens: int | None = None

    def __init__(self, profile: cProfile.Profile | None = None):
        rng = np.random.default_rng(0)
        self._prompts = rng.integers(0, 255, (BATCH, PROMPT_TOKENS), dtype=np.int32)
        self._profile = profile
        self._left = BATCH

    def sessions(self) -> Iterator[_Session]:
        from mcjax.types import Request, Script
        from mcjax.workload.base import Turn

        if self._profile is not None:
            self._profile.enable()
        for index, tokens in enumerate(self._prompts):
            request = Request(index, 0, PROMPT_TOKENS, OUTPUT_TOKENS, tokens)
            yield _Session(Turn(request, Script(OUTPUT_TOKENS)), self._one_ended)

    def _one_ended(self) -> None:
        self._left -= 1
        if not self._left and self._profile is not None:
            self._profile.disable()

    def inputs(self) -> dict[str, str]:
        return {}


def run(_out: Path, _options: argparse.Namespace) -> dict[str, Any]:
    """Both models, each with and without a profile of the event loop's thread."""
    rows = []
    for name, model in MODELS.items():
        say(f"overhead: {name}")
        rows.append({"model": name, **_shares(model), "profile": _profile(model)})
    return {"rows": rows}


def _serve(model: str, profile: cProfile.Profile | None = None) -> None:
    import mcjax

    overrides = [model, "cluster=1m", "backend.numerics=fast", "backend.max_context_tokens=256", "verify=false"]
    mcjax.run([*overrides, "track=none"], progress=False, workload=Fixed(profile))


def _shares(model: str) -> dict[str, Any]:
    watch = Watch()
    off = watch.on()
    try:
        _serve(model)
    finally:
        off()
    full = [step for step in watch.steps if step.width == 1 and step.rows == BATCH]
    # Warm-up's idle calls have no rows; the last steps of the outputs have fewer.
    wall_ns = full[-1].end_ns - full[0].start_ns
    inside_ns = sum(step.end_ns - step.start_ns for step in full)
    dispatch_ns = sum(step.dispatch_ns for step in full)
    between = [later.start_ns - earlier.end_ns for earlier, later in pairwise(full)]
    return {
        "steps": len(full),
        "step_ms": wall_ns / len(full) / 1e6,
        "device_share": (inside_ns - dispatch_ns) / wall_ns,
        "dispatch_share": dispatch_ns / wall_ns,
        "python_share": (wall_ns - inside_ns) / wall_ns,
        "between_median_us": float(np.median(between)) / 1e3,
        "between_longest_us": max(between) / 1e3,
    }


def _profile(model: str) -> list[dict[str, Any]]:
    """CPU seconds of the event loop's thread by function, the costliest first."""
    profile = cProfile.Profile(time.thread_time, builtins=False)
    _serve(model, profile)
    statistics: dict[Any, Any] = pstats.Stats(profile).stats  # pyright: ignore[reportAttributeAccessIssue]
    rows = [
        {"function": named(place), "own_s": own_s, "calls": calls}
        for place, (_, calls, own_s, _, _) in statistics.items()
        if "mcjax/" in place[0].replace("\\", "/")
    ]
    return sorted(rows, key=lambda row: -row["own_s"])[:12]
