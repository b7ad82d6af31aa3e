"""The loads that the benchmarks play are what their page says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Importer = Callable[[str], ModuleType]


def test_conv2x_is_the_trace_twice(module: Importer, small_traces: Path, tmp_path: Path) -> None:
    """The second copy comes 137 ms later and shares no block with the first; what is cut is the end."""
    source, target = small_traces / "conversation_trace.jsonl", tmp_path / "conv2x.jsonl"
    assert module("conv2x").write_trace(source, target, 1000) == 80
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    first, second = rows[::2], rows[1::2]
    assert first == [json.loads(line) for line in source.read_text().splitlines()]
    assert [row["timestamp"] - 137 for row in second] == [row["timestamp"] for row in first]
    shifts = {b - a for one, two in zip(first, second) for a, b in zip(one["hash_ids"], two["hash_ids"])}
    assert len(shifts) == 1
    assert not {b for row in first for b in row["hash_ids"]} & {b for row in second for b in row["hash_ids"]}
    assert module("conv2x").write_trace(source, target, 7) == 7
    assert [json.loads(line) for line in target.read_text().splitlines()] == rows[:7]


@pytest.mark.parametrize(("requests", "rate_per_s"), [(1, 0.01), (50, 0.17), (300, 3.0), (2000, 40.0)])
def test_load(
    module: Importer,
    small_traces: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    requests: int,
    rate_per_s: float,
) -> None:
    """So many requests, in order, at the rate, each with the lengths of a row of the trace."""
    monkeypatch.setenv("MCJAX_TRACES", str(small_traces))
    target = tmp_path / "load.csv"
    module("azure_load").write_load(target, requests, rate_per_s)
    from mcjax.workload.azure import Azure, parse_rows

    stamps = [line.split(",")[0] for line in target.read_text().splitlines()[1:]]
    assert stamps == sorted(stamps)
    rows = parse_rows(target.read_bytes().splitlines(), "load")
    assert len(rows) == requests
    if requests > 100:
        assert (requests - 1) / (rows.arrival_ns[-1] / 1e9) == pytest.approx(rate_per_s, rel=0.1)
    known = parse_rows((small_traces / "azure_llm_2023_conv.csv").read_bytes().splitlines(), "trace")
    lengths = Counter(zip(rows.input_tokens, rows.output_tokens))
    assert lengths.keys() <= set(zip(known.input_tokens, known.output_tokens))
    assert sum(1 for _ in Azure(path=str(target)).sessions()) == requests


def test_differences_of_reports(module: Importer) -> None:
    """Real time is no difference; a figure that only one report has is."""
    differences = module("dynosim").differences
    assert differences([{"a": 1, "wall_time_ms": 1}, {"a": 1, "wall_time_ms": 2}]) == []
    assert differences([{"a": 1, "b": 2}, {"a": 2}]) == ["a", "b"]


def test_a_full_cluster_holds_what_it_says(module: Importer) -> None:
    """The first block is everywhere; a prompt's own conversation is found where it is held, and new blocks nowhere."""
    cluster = module("full_cluster").FullCluster(8, 5000)
    assert 4900 < len(cluster.state.directory) <= 5000
    found: list[int] = []
    for request, blocks in cluster.prompts(50):
        view = cluster.state.view(cluster.now_ns, request.prompt_tokens, blocks)
        cached = view.prefix_tokens // view.block_tokens
        assert cached.min() >= 1
        assert cached.max() <= len(blocks) - 4
        found.append(int(cached.max()))
    assert max(found) > 8


def test_usage_of_a_child(module: Importer, tmp_path: Path) -> None:
    """CPU and memory are the child's; one that fails is told with the end of its output."""
    import resource
    import sys

    measure = module("measure")
    # A child begins as a copy of its parent, whose own peak the kernel counts as the child's.
    size = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + 300_000_000
    small = measure.measured([sys.executable, "-c", "pass"], tmp_path, tmp_path / "logs" / "a.log", "small")
    large = measure.measured([sys.executable, "-c", f"x = bytearray({size})"], tmp_path, tmp_path / "b.log")
    assert large.peak_rss_bytes - small.peak_rss_bytes > 200_000_000
    assert small.command == "small"
    assert small.cpu_s == small.user_s + small.system_s > 0
    with pytest.raises(measure.BenchmarkError, match=r"exit status 3\ngone"):
        measure.measured([sys.executable, "-c", "print('gone'); exit(3)"], tmp_path, tmp_path / "c.log", "it")
