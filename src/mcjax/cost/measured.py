"""What a machine was measured to take: steps alone and beside others, copies, hand-offs, and the sizes of its engine.

`mcjax validate` writes the file; `cost=measured cost.path=FILE` reads it. In the simulated world such a cost stands for
the whole machine: capacities are those of the engine that was measured, copies occupy the threads that they occupy
there, and what computes slows what else computes (`mcjax.backends.sim.measured_world`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mcjax.cost.measurements import Measurement
from mcjax.cost.table import Table
from mcjax.errors import ConfigError
from mcjax.types import NS_PER_S

VERSION = 1

LASTING_NS = 250_000_000
"""How long the machine stays as it is. On one with other work, the errors of steps 20 to 200 ms apart were correlated
by 0.1 to 0.6, of steps more than a second apart by 0.2 at most."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The engine that was measured: what an executor holds, and the pool of a node."""

    pages: int
    page_tokens: int
    max_batch: int
    chunk_tokens: int
    max_context_tokens: int
    pool_blocks: int
    shares_decoded: bool


@dataclass(frozen=True, slots=True)
class Line:
    """Nanoseconds of something with a fixed part and a part for each piece."""

    fixed_ns: int
    each_ns: int

    def at(self, pieces: int) -> int:
        return self.fixed_ns + self.each_ns * pieces


@dataclass(frozen=True, slots=True)
class Copies:
    """How long copies take, by blocks: off a device and onto one (on its thread), and between host memories."""

    off_device: Line
    onto_device: Line
    between_hosts: Line


@dataclass(frozen=True, slots=True)
class Overheads:
    """What passes between mechanisms, nanoseconds: the event loop, wake-ups of threads, Python. Medians."""

    prefill_idle_ns: int
    """Until a chunk begins on an instance that had nothing to do: all that happened since its request arrived."""
    prefill_plan_ns: int
    """From the end of one chunk until the next begins."""
    decode_plan_ns: int
    """The same for decode steps that are not of one plan."""
    copy_ns: int
    """Until a copy is in the hands of its thread."""
    factors: tuple[float, ...] = (1.0,)
    """What each takes over its median: quantiles, from the least to the most. A few take many times what most do."""


@dataclass(frozen=True, slots=True)
class Spread:
    """What equal steps took over their median: quantiles, from the least to the most, of two factors."""

    lasting: tuple[float, ...]
    """One for all steps that begin within `LASTING_NS`: for a while the machine is slower, or faster."""
    fleeting: tuple[float, ...]
    """One for each step."""


def at(quantiles: tuple[float, ...], rank: float) -> float:
    """The value at a rank (0 to 1) of a distribution in equal steps of probability."""
    place = rank * (len(quantiles) - 1)
    lower = int(place)
    upper = min(lower + 1, len(quantiles) - 1)
    return quantiles[lower] + (place - lower) * (quantiles[upper] - quantiles[lower])


@dataclass(frozen=True)
class Machine:
    """One machine, one model, one engine. `steps` were measured while nothing else computed."""

    hardware: str
    model: str
    sizes: Sizes
    steps: tuple[Measurement, ...]
    slowdown: Mapping[str, Mapping[str, float]]
    """`slowdown[kind][other]`: how much longer a step of one kind takes while one of another kind runs elsewhere on the
    machine; kinds are `prefill` and `decode`. One that is not named slows nothing."""
    copies: Copies
    overheads: Overheads
    spread: Mapping[str, Spread] = field(default_factory=dict[str, Spread])
    """By kind of step. Without any, equal steps take equally long."""
    notes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Where the figures come from."""


class Measured:
    """Steps of a `Machine`, interpolated as `table.Table` does it, chunk by chunk.

    A prompt is cut from where it starts into chunks of the engine's width, so a splitting at multiples of that adds up
    and no other. A step with chunks and decodes takes as long as both: this engine never fuses them. Everything here is
    a step that has the machine to itself; the simulated world adds what its neighbours do to it.
    """

    def __init__(self, machine: Machine, name: str = "measured", allow_mismatch: bool = False):
        self.name = name
        self.machine = machine
        self._allow_mismatch = allow_mismatch
        self._chunk = machine.sizes.chunk_tokens
        self._chunk_ns = lru_cache(maxsize=65536)(self._table.prefill_ns)

    @cached_property
    def _table(self) -> Table:
        return Table(self.machine.steps, self.name)

    def check(self, hardware_name: str, model_name: str) -> None:
        """Raise `ConfigError` when the run's hardware or model is not what was measured."""
        for key, measured, used in (
            ("hardware", self.machine.hardware, hardware_name),
            ("model", self.machine.model, model_name),
        ):
            if used != measured and not self._allow_mismatch:
                problem = f"cost={self.name} was measured on {measured}; use cost=roofline, or cost.allow_mismatch=true"
                raise ConfigError(key, used, problem)

    def prefill_ns(self, start_tokens: int, length_tokens: int) -> int:
        total_ns, end = 0, start_tokens + length_tokens
        for start in range(start_tokens, end, self._chunk):
            total_ns += self._chunk_ns(start, min(self._chunk, end - start))
        return total_ns

    def step_ns(self, batch: int, context_tokens: int, steps: int) -> NDArray[np.int64]:
        """`[steps]` int64; 0 for an empty batch. The mean context stands for all."""
        return self._table.step_ns(batch, context_tokens, steps)

    def mixed_ns(self, start_tokens: int, length_tokens: int, batch: int, context_tokens: int) -> int:
        """The chunk's program, then the decode program."""
        return self.prefill_ns(start_tokens, length_tokens) + int(self.step_ns(batch, context_tokens, 1)[0])

    def prefill_s(self, prompt_tokens: int, reused_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """`[I]` float64 seconds."""
        reused = np.asarray(reused_tokens, np.int64).tolist()
        return np.array([self.prefill_ns(start, prompt_tokens - start) for start in reused], np.float64) / NS_PER_S

    def decode_s(self, batch: NDArray[np.int64], context_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """`[I]` float64 seconds; 0 for an empty batch."""
        return self._table.decode_s(batch, context_tokens)


def read(path: str, name: str = "measured", allow_mismatch: bool = False) -> Measured:
    """The cost of a file that `write` wrote. Raises `ConfigError` if it cannot be read, or holds something else."""
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("cost.path", path, "no such file; `mcjax validate` measures this machine") from None
    except (OSError, ValueError) as problem:
        raise ConfigError("cost.path", path, f"cannot be read ({problem})") from None
    try:
        machine = _machine(content)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise ConfigError("cost.path", path, f"is no file of `mcjax validate` ({problem!r})") from None
    return Measured(machine, name, allow_mismatch)


def write(machine: Machine, path: Path) -> None:
    """A file that `read` reads."""
    content: dict[str, Any] = {"version": VERSION, **asdict(machine)}
    rows = cast("list[dict[str, Any]]", content.pop("steps"))
    text = json.dumps(content, indent=1, sort_keys=False)
    steps = ",\n  ".join(json.dumps(row) for row in rows)
    path.write_text(f'{text[:-2]},\n "steps": [\n  {steps}\n ]\n}}\n', encoding="utf-8")


def _machine(content: dict[str, Any]) -> Machine:
    if content["version"] != VERSION:
        raise ValueError(f"version {content['version']}, this mcjax reads version {VERSION}")
    copies = cast("dict[str, dict[str, int]]", content["copies"])
    slowdown = cast("dict[str, dict[str, Any]]", content["slowdown"])
    for kind, factors in slowdown.items():
        for other, factor in factors.items():
            if not float(factor) >= 1:
                raise ValueError(f"slowdown.{kind}.{other} is {factor}, and must be 1 or more")
    return Machine(
        hardware=str(content["hardware"]),
        model=str(content["model"]),
        sizes=Sizes(**content["sizes"]),
        steps=tuple(Measurement(**row) for row in content["steps"]),
        slowdown={kind: {other: float(f) for other, f in factors.items()} for kind, factors in slowdown.items()},
        copies=Copies(**{name: Line(**line) for name, line in copies.items()}),
        overheads=_overheads(content["overheads"]),
        spread={
            kind: Spread(tuple(map(float, factors["lasting"])), tuple(map(float, factors["fleeting"])))
            for kind, factors in content["spread"].items()
        },
        notes=content.get("notes", {}),
    )


def _overheads(content: dict[str, Any]) -> Overheads:
    medians = {name: int(value) for name, value in content.items() if name != "factors"}
    return Overheads(**medians, factors=tuple(map(float, content["factors"])))
