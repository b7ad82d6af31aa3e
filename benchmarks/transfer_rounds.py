"""The rounds of `transfer.py`: every system in turn, in another order each round, so that whatever else the machine
does hits all of them alike; ratios are of the same round."""

from __future__ import annotations

import random
import statistics
from dataclasses import asdict
from typing import Any

from measure import BenchmarkError, say
from transfer_pairs import Pair
from transfer_systems import SYSTEMS, Plan

Samples = dict[tuple[str, str], list[dict[str, float]]]
"""By system (with its variant) and case; one a round."""


WARM_BYTES = 1 << 24


def cases(sizes: list[int], batch: int, sample_bytes: int, most_bytes: int) -> dict[str, Plan]:
    """What is measured of each size: one block at a time, and a batch, of at most `most_bytes`."""
    found: dict[str, Plan] = {}
    for size in sizes:
        count = max(1, min(batch, most_bytes // size))
        found[f"single {size}"] = Plan(size, 1, max(1, sample_bytes // size))
        found[f"batch {size}"] = Plan(size, count, max(1, sample_bytes // (size * count)))
    return found


def checked(pairs: dict[str, Pair], plans: dict[str, Plan]) -> dict[str, str]:
    """Of the systems whose bytes do not land where they should: why they are left out."""
    wrong: dict[str, str] = {}
    for system, pair in pairs.items():
        for case, plan in plans.items():
            try:
                with pair.turn() as reader:
                    arrived = reader.ask("check", plan=asdict(plan))
            except BenchmarkError as problem:
                wrong[system] = f"{case}: {problem}"
                break
            if not arrived:
                wrong[system] = f"{case}: bytes did not land where they should"
                break
    return wrong


def sampled(pairs: dict[str, Pair], plans: dict[str, Plan], rounds: int, verified: bool) -> Samples:
    """`rounds` of each system and case, after one that is not counted; `verified`: also with checksums, where there are
    any."""
    samples: Samples = {}
    for number in range(rounds + 1):
        say(f"  round {number} of {rounds}" + ("" if number else ", not counted"))
        for case, plan in plans.items():
            order = list(pairs)
            random.Random(number).shuffle(order)
            for system in order:
                pair = pairs[system]
                with pair.turn() as reader:
                    _warm(reader, plan)
                    for checks in (False, True) if verified and pair.kind.verifies else (False,):
                        found = reader.ask("sample", plan=asdict(plan), verified=checks)
                        if number:
                            name = f"{system}, verified" if checks else system
                            samples.setdefault((name, case), []).append(found)
    return samples


def _warm(reader: Any, plan: Plan) -> None:
    """Awake after its stop: some blocks that are not timed."""
    some = min(plan.batch, max(1, WARM_BYTES // plan.block_bytes))
    reader.ask("sample", plan=asdict(Plan(plan.block_bytes, some, 1, plan.seed)), verified=False)


def latencies(pairs: dict[str, Pair], nbytes: int, count: int, rounds: int) -> dict[str, list[list[float]]]:
    """Seconds of single reads, by system, a list a round."""
    found: dict[str, list[list[float]]] = {system: [] for system in pairs}
    for number in range(rounds):
        order = list(pairs)
        random.Random(number).shuffle(order)
        for system in order:
            with pairs[system].turn() as reader:
                found[system].append(reader.ask("latencies", nbytes=nbytes, count=count))
    return found


def summary(samples: Samples, against: tuple[str, ...]) -> list[dict[str, Any]]:
    """A row for each system and case: bytes a second, CPU seconds a GB of both sides, and the ratio of its rate to that
    of each of `against` (medians over rounds, each against its neighbours of the same round)."""
    rows: list[dict[str, Any]] = []
    for (system, case), found in samples.items():
        rates = [one["nbytes"] / one["wall_s"] for one in found]
        ratios: dict[str, float] = {}
        for other in against:
            theirs = samples.get((other, case))
            if theirs is not None and other != system:
                others = [one["nbytes"] / one["wall_s"] for one in theirs]
                ratios[other] = statistics.median(ours / rate for ours, rate in zip(rates, others, strict=True))
        rows.append(
            {
                "system": system,
                "case": case,
                "median_bytes_per_s": statistics.median(rates),
                "best_bytes_per_s": max(rates),
                "reader_cpu_s_per_gb": statistics.median(1e9 * one["own_s"] / one["nbytes"] for one in found),
                "peer_cpu_s_per_gb": statistics.median(1e9 * one["peer_s"] / one["nbytes"] for one in found),
                "rounds": len(found),
                "ratios": ratios,
            }
        )
    names = list(SYSTEMS)
    return sorted(rows, key=lambda row: names.index(row["system"].removesuffix(", verified")))
