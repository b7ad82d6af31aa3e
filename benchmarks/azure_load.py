"""A load of any rate and size made of the Azure 2023 conversation trace: the trace laid over itself many times."""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
from measure import BenchmarkError
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NAMES = ("AzureLLMInferenceTrace_conv.csv", "azure_llm_2023_conv.csv")
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
BEGIN = datetime(2023, 11, 16)


def find_trace() -> Path:
    """The trace, under either name. Raises `BenchmarkError` that says where it was looked for."""
    told = os.environ.get("MCJAX_TRACES")
    tried = [Path(told or "traces") / name for name in NAMES]
    for path in tried:
        if path.is_file():
            return path
    raise BenchmarkError(
        f"this part needs the Azure 2023 conversation trace (Azure/AzurePublicDataset): none of "
        f"{', '.join(map(str, tried))}. Set MCJAX_TRACES to the folder that has it"
    )


def write_load(target: Path, requests: int, rate_per_s: float) -> None:
    """Write the first `requests` arrivals of a load of `rate_per_s`, in the trace's own format.

    As many copies as come nearest to the rate, each turned by an equal share of the trace's hour so that they do not
    arrive together, and all played a little faster or slower to hit the rate. Every request keeps its lengths.
    """
    from mcjax.workload.azure import parse_rows

    source = find_trace()
    rows = parse_rows(source.read_bytes().splitlines(), str(source))
    arrival_s = np.array(rows.arrival_ns) / 1e9
    lengths = np.stack([np.array(rows.input_tokens), np.array(rows.output_tokens)], axis=1)
    hour_s = float(arrival_s.max()) * len(arrival_s) / (len(arrival_s) - 1)
    own_rate = len(arrival_s) / hour_s
    copies = max(1, round(rate_per_s / own_rate))
    stretch = copies * own_rate / rate_per_s
    margin, all_s, all_rows = 1.2, np.zeros(0), np.zeros(0, np.int64)
    while len(all_s) < requests:  # the trace's rate is not even
        all_s, all_rows = _arrivals(arrival_s, hour_s, copies, margin * requests / rate_per_s / stretch)
        margin *= 2
    order = np.argsort(all_s, kind="stable")[:requests]
    all_s = all_s[order] * stretch
    with target.open("w") as file:
        file.write(HEADER + "\n")
        for at_s, (context, generated) in zip(all_s.tolist(), lengths[all_rows[order]].tolist()):
            file.write(f"{BEGIN + timedelta(seconds=at_s):%Y-%m-%d %H:%M:%S.%f},{context},{generated}\n")


def _arrivals(arrival_s: Floats, hour_s: float, copies: int, window_s: float) -> tuple[Floats, NDArray[np.int64]]:
    """Times within the window, of all copies, and the row of each."""
    times: list[Floats] = []
    rows: list[NDArray[np.int64]] = []
    for copy in range(copies):
        turned_s = (arrival_s + hour_s * copy / copies) % hour_s
        for begin_s in np.arange(0.0, window_s, hour_s):
            inside = np.flatnonzero(begin_s + turned_s < window_s)
            times.append(begin_s + turned_s[inside])
            rows.append(inside)
    return np.concatenate(times), np.concatenate(rows)
