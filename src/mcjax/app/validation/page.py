"""A validation as text: the table on the terminal, and the Markdown page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcjax.app.validation.comparison import FIGURES, WITHIN, Regime, Row


def table(found: Sequence[Row]) -> list[str]:
    """Aligned lines, a row a load and figure."""
    lines = [f"{'load':<10} {'figure':<16} {'real':>10} {'least - most':>17} {'simulated':>10} {'error':>7}  within"]
    for row in found:
        span = f"{_value(row.figure, row.least)} - {_value(row.figure, row.most)}"
        lines.append(
            f"{row.load:<10} {FIGURES[row.figure][2]:<16} {_value(row.figure, row.real):>10} {span:>17} "
            f"{_value(row.figure, row.simulated):>10} {_percent(row.error):>7}  {_verdict(row)}"
        )
    return lines


def step_table(found: Sequence[Regime]) -> list[str]:
    """Aligned lines, a row a regime."""
    width = max((len(regime.name) for regime in found), default=6)
    lines = [f"{'steps':<{width}} {'number':>7} {'real ms':>8} {'cost ms':>8} {'error':>7} {'spread':>7}"]
    return lines + [
        f"{regime.name:<{width}} {regime.steps:>7,} {regime.real_ns / 1e6:>8.2f} {regime.predicted_ns / 1e6:>8.2f} "
        f"{_percent(regime.error):>7} {regime.spread:>6.0%}"
        for regime in found
    ]


def markdown(result: Mapping[str, Any], found: Sequence[Row], steps: Sequence[Regime]) -> str:
    """The page: what was compared and how, both tables, the picture."""
    settings, loads = result["settings"], result["load_averages"]
    judged = [row for row in found if row.within is not None]
    lines = [
        "# Simulator against engine",
        "",
        f"`{' '.join(['mcjax validate', *settings['overrides']])}`, {settings['repeats']} repeats, "
        f"{settings['sessions']} sessions a run; {result['machine']}.",
        "",
        f"{sum(row.within is True for row in judged)} of {len(judged)} figures are within {WITHIN:.0%}. Medians over "
        "the repeats; a load is a share of the capacity of "
        f"{result['capacity_per_s']:.2f} sessions a second. "
        f"The machine's load average was {min(loads):.1f} to {max(loads):.1f} as runs began.",
        "",
        "| load | figure | real | least to most | simulated | error | within | with the run's own step times | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        name = row.figure
        lines.append(
            f"| {row.load} | {FIGURES[name][2]} | {_value(name, row.real)} | {_value(name, row.least)} to "
            f"{_value(name, row.most)} | {_value(name, row.simulated)} | {_percent(row.error)} | {_verdict(row)} | "
            f"{_value(name, row.own_costs)} | {_percent(row.own_error)} |"
        )
    lines += [
        "",
        "Step times alone, over all real runs: the median step, what its cost says, and predicted over real.",
        "",
        "| steps | number | real, ms | cost, ms | error, median | spread, 10th to 90th percentile |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {regime.name} | {regime.steps:,} | {regime.real_ns / 1e6:.2f} | {regime.predicted_ns / 1e6:.2f} | "
        f"{_percent(regime.error)} | +-{regime.spread:.0%} |"
        for regime in steps
    ]
    return "\n".join([*lines, "", "![errors by load, and distributions of both sides](validation.png)", ""])


def _value(figure: str, value: float) -> str:
    return f"{value:,.0f}" if figure == "throughput" else f"{value * 1e3:.1f} ms"


def _percent(error: float) -> str:
    return f"{error:+.1%}"


def _verdict(row: Row) -> str:
    return {True: "yes", False: "no", None: ""}[row.within]
