"""How much of what the step programs computed was padding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mcjax.backends.jax.plans import Call, Plan


@dataclass(slots=True)
class Count:
    """Tokens (of a prompt's chunk) or rows (of a decode step)."""

    asked: int = 0
    computed: int = 0

    def add(self, call: Call) -> None:
        self.asked += int(call.rows[:, 0].sum())
        self.computed += call.batch * call.width


@dataclass(slots=True)
class Tally:
    """What one executor's plans have asked for and computed, by phase."""

    prefill: Count = field(default_factory=Count)
    decode: Count = field(default_factory=Count)

    def add(self, plan: Plan) -> None:
        """One more step of a plan."""
        for call in plan.prefills:
            self.prefill.add(call)
        if plan.decode is not None:
            self.decode.add(plan.decode)


def wasted(counts: Iterable[Count]) -> float | None:
    """The share of what was computed that was padding; None if nothing was computed."""
    found = list(counts)
    computed = sum(count.computed for count in found)
    return 1 - sum(count.asked for count in found) / computed if computed else None
