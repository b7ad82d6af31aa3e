"""What came out: figures of both sides by load, step times by regime, and how far they are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from mcjax.app.validation.steps import MOSTLY_ALONE, MOSTLY_BESIDE, Step, predicted_ns
from mcjax.cost.measured import Measured
from mcjax.track.run import Run

WITHIN = 0.10
"""What is asked of the figures in `JUDGED`."""

FIGURES: Mapping[str, tuple[str, str, str]] = {
    "ttft_p50": ("ttft_s", "p50", "TTFT p50"),
    "ttft_p99": ("ttft_s", "p99", "TTFT p99"),
    "tbt_p50": ("tbt_s", "p50", "TBT p50"),
    "tbt_p99": ("tbt_s", "p99", "TBT p99"),
    "throughput": ("output_tokens_per_s", "", "output tokens/s"),
}
"""Name: where `summary.json` has it, and how it is called."""

JUDGED = ("ttft_p50", "tbt_p50", "throughput")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure at one load: medians over the repeats, and the least and the most of the real ones."""

    load: str
    figure: str
    real: float
    least: float
    most: float
    simulated: float
    own_costs: float
    """Simulated with the step times and hand-offs of the real run itself: what error is left is not theirs."""

    @property
    def error(self) -> float:
        return self.simulated / self.real - 1

    @property
    def own_error(self) -> float:
        return self.own_costs / self.real - 1

    @property
    def within(self) -> bool | None:
        """Whether the error is as small as asked; None where nothing is asked."""
        return abs(self.error) <= WITHIN if self.figure in JUDGED else None


@dataclass(frozen=True, slots=True)
class Regime:
    """Steps of one kind in one company, over all real runs."""

    name: str
    steps: int
    real_ns: float
    predicted_ns: float
    error: float
    """Median of predicted / real - 1."""
    spread: float
    """Half the distance between the tenth and the ninetieth percentile of predicted / real."""


def figures(run: Run) -> dict[str, float]:
    """A run's figures, by name."""
    found: dict[str, float] = {}
    for name, (key, part, _) in FIGURES.items():
        value: Any = run.summary[key]
        found[name] = float(value[part] if part else value)
    return found


def rows(points: Sequence[Mapping[str, Any]]) -> list[Row]:
    """From points `{load, real, simulated, own_costs}`, each with figures, in their order."""
    found: list[Row] = []
    for load in dict.fromkeys(str(point["load"]) for point in points):
        own = [point for point in points if point["load"] == load]
        for name in FIGURES:
            real = [point["real"][name] for point in own]
            simulated = median(point["simulated"][name] for point in own)
            own_costs = median(point["own_costs"][name] for point in own)
            found.append(Row(load, name, median(real), min(real), max(real), simulated, own_costs))
    return found


def regime_of(step: Step) -> str:
    """Kind, size and company of a step."""
    if step.shared <= MOSTLY_ALONE:
        company = "alone"
    else:
        company = "beside the other role" if step.shared >= MOSTLY_BESIDE else "partly beside it"
    if step.kind == "prefill":
        return f"prefill chunk, {company}"
    low = 1 << (step.batch.bit_length() - 1)
    batch = "1" if low == 1 else f"{low} to {2 * low - 1}"
    return f"decode, batch {batch}, {company}"


def regimes(pairs: Sequence[tuple[Measured, Sequence[Step]]]) -> list[Regime]:
    """Errors of the step costs alone: each run's steps against the cost that its simulation went by."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for cost, steps in pairs:
        for step in steps:
            groups.setdefault(regime_of(step), []).append((float(step.duration_ns), predicted_ns(cost, step)))
    found: list[Regime] = []
    for name in sorted(groups):
        ratios = sorted(predicted / max(1.0, real) for real, predicted in groups[name])
        tenth, last = ratios[len(ratios) // 10], ratios[len(ratios) - 1 - len(ratios) // 10]
        real, predicted = (median(side) for side in zip(*groups[name], strict=True))
        found.append(Regime(name, len(ratios), real, predicted, median(ratios) - 1, (last - tenth) / 2))
    return found
