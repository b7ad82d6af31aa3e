"""The engine's benchmark: turns, ratios, tables, and what it says when torch is not there."""

from __future__ import annotations

import sys

import pytest


def test_contestants_take_turns_and_the_first_round_does_not_count(module):
    timing = module("engine_timing")
    calls: list[str] = []
    contestants = {
        name: timing.Contestant(lambda name=name: calls.append(name), lambda name=name: calls.append(f"after {name}"))
        for name in "ab"
    }
    timings = timing.interleaved(contestants, 3)
    assert calls == ["a", "after a", "b", "after b"] * 4
    assert [len(timings[name].wall_s) for name in "ab"] == [3, 3]


def test_a_missing_peer_is_named_with_its_extra(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(module("measure").BenchmarkError, match=r"torch is missing.*mcjax\[parity\]"):
        module("engine_timing").peer("torch")
    with pytest.raises(module("measure").BenchmarkError, match="torch is missing"):
        module("engine_limits").run(None, module("engine").parsed(["limits"]))


def test_ratios_and_shares_reach_the_table(module):
    timing = module("engine_timing").Timing
    timings = {
        "mcjax float32": timing([0.010, 0.020, 0.030], [0.020, 0.040, 0.060]),
        "torch float32": timing([0.040, 0.040, 0.030], [0.04] * 3),
        "mcjax bfloat16": timing([0.050] * 3, [0.05] * 3),
        "torch bfloat16": timing([0.025] * 3, [0.05] * 3),
    }
    row = module("engine_steps")._compared(timings, 8, {"float32": 0.005, "bfloat16": 0.01})
    assert row["ratio"] == {"float32": 2.0, "bfloat16": 0.5}  # round by round: 4, 2, 1
    assert row["best"] == {"mcjax": "mcjax float32", "torch": "torch bfloat16"}
    assert row["best_ratio"] == 1.25
    limits = {"dram_bytes_per_s": 4e10, "flops_per_s": {"float32": 4e11, "bfloat16": 8e11}}
    part = {"command": "c", "load": 0.5, "limits": limits, "rows": [{"batch": 8, "context_tokens": 128, **row}]}
    text = module("engine_tables").tables({"decode": part})
    assert "| B = 8, context 128 | mcjax float32 | 10.0 | 20.0 | 800 | 2.0 | 2.00 | 50% |" in text
    assert "| B = 8, context 128 | torch float32 | 30.0 | 40.0 | 267 | 1.3 |  |  |" in text
    assert "40.0 GB/s, 400 GFLOP/s float32, 800 GFLOP/s bfloat16" in text


def test_unknown_parts_are_refused(module, capsys):
    with pytest.raises(SystemExit):
        module("engine").parsed(["decoding"])
    assert "no part decoding; there are limits, decode, prefill, attention" in capsys.readouterr().err
