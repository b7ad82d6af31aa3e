"""How often intervals of `mcjax compare` hold the truth, and how often it marks a best, for `docs/compare.md`.

`python benchmarks/intervals.py pairs` (a minute), `marks` (minutes), `blocks` (minutes: it simulates).
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mcjax.track.compare.bootstrap import paired, resamples
from mcjax.track.compare.comparison import compare
from mcjax.track.record import RunRecord
from mcjax.track.run import Run

Sampler = Callable[[np.random.Generator, tuple[int, int]], NDArray[np.float64]]
DIFFERENCES: dict[str, Sampler] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "exponential": lambda rng, shape: rng.exponential(size=shape) - 1,
    "lognormal": lambda rng, shape: rng.lognormal(size=shape) - math.exp(0.5),
    "Student's t, 3 degrees": lambda rng, shape: rng.standard_t(3, shape),
}
PAIRS = (6, 8, 10, 20)
FIGURES = ("ttft_s.mean", "ttft_s.p50", "ttft_s.p90", "ttft_s.p99", "tbt_tail_s.p90", "prefix_hit_rate.token")
POLICIES = ("random", "kvcache_centric")
EFFECTS = (0.0, 0.5, 1.0, 2.0, 4.0)
TRAFFIC = ("backend=sim", "workload=synthetic", "hardware=a800x8", "model=llama3-70b", "cluster=2p2d", "track=none")


def covered(sampler: Sampler, pairs: int, trials: int, draws: int, error: float = 0.05) -> float:
    """The share of intervals of the mean difference that hold the truth, which is 0."""
    rng = np.random.default_rng(pairs)
    chosen = resamples(draws, pairs, rng)
    found = [paired(sample, error, chosen) for sample in sampler(rng, (trials, pairs))]
    return sum(interval.low <= 0 <= interval.high for interval in found) / trials


def marked(groups: int, pairs: int, effect: float, trials: int, draws: int) -> float:
    """The share of comparisons that mark a best, where one policy is better by `effect` standard deviations of what a
    policy's figure varies by itself; what all share with the traffic is as large again."""
    rng = np.random.default_rng([groups, pairs])
    count = 0
    for _ in range(trials):
        figures = rng.normal(size=pairs) + rng.normal(size=(groups, pairs))
        figures[-1] -= effect
        found = compare(_runs(figures), ["ttft_s.p90"], resamples=draws)
        count += any(cell.best for row in found.rows for cell in row.cells)
    return count / trials


def _runs(figures: NDArray[np.float64]) -> list[Run]:
    return [
        Run(None, {"ttft_s": {"p90": value}, "digest": f"{policy} {seed}"}, {}, {}, record=_record(policy, seed))
        for policy, own in enumerate(figures.tolist())
        for seed, value in enumerate(own)
    ]


def _record(policy: int, seed: int) -> RunRecord:
    return RunRecord(config={"policy": policy, "seed": seed})


def held(seeds: int, sessions: int) -> dict[str, float]:
    """Of single pairs of runs, one a seed: the share whose interval by blocks holds the mean difference over seeds."""
    import mcjax

    values: dict[str, list[float]] = {name: [] for name in FIGURES}
    bounds: dict[str, list[tuple[float, float]]] = {name: [] for name in FIGURES}
    for seed in range(seeds):
        gc.collect()  # the last runs are cycles of references, tables and all
        load = [*TRAFFIC, f"workload.sessions={sessions}", "workload.rate_per_s=4", f"seed={seed}"]
        both = [
            mcjax.run([*load, f"sched/prefill={policy}"], progress=False) for policy in ("random", "kvcache_centric")
        ]
        for row in compare(both, FIGURES, resamples=2000).rows:
            away = row.cells[1].difference
            assert away is not None
            assert away.interval is not None
            values[row.metric.name].append(away.value)
            bounds[row.metric.name].append((away.interval.low, away.interval.high))
    truth = {name: float(np.mean(own)) for name, own in values.items()}
    return {name: float(np.mean([low <= truth[name] <= high for low, high in bounds[name]])) for name in FIGURES}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("pairs", "marks", "blocks"))
    parser.add_argument("--trials", type=int, help="comparisons a cell, or seeds")
    options = parser.parse_args()
    if options.part == "pairs":
        trials = options.trials or 10_000
        rows = [[name, *(f"{covered(own, n, trials, 2000):.3f}" for n in PAIRS)] for name, own in DIFFERENCES.items()]
        print(table(["differences", *(f"{pairs} pairs" for pairs in PAIRS)], rows))
    elif options.part == "marks":
        trials, rows = options.trials or 1000, list[list[str]]()
        for groups, pairs in ((2, 6), (2, 8), (2, 20), (3, 8), (5, 8), (5, 20)):
            shares = [f"{marked(groups, pairs, effect, trials, 1000):.3f}" for effect in EFFECTS]
            rows.append([f"{groups} groups, {pairs} pairs", *shares])
        print(table(["", *(f"better by {effect:g}" for effect in EFFECTS)], rows))
    else:
        rows = [[name, f"{share:.2f}"] for name, share in held(options.trials or 100, 100).items()]
        print(table(["figure", "intervals that hold the mean over seeds"], rows))


if __name__ == "__main__":
    main()
