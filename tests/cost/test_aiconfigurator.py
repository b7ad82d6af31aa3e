"""The adapter over a stand-in of aiconfigurator's handle, and over the real one where it is installed."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from mcjax.cost.aiconfigurator import measure, tabulate
from mcjax.cost.catalogue import hardware, model
from mcjax.cost.measurements import Measurement
from mcjax.cost.model_shape import ModelShape
from mcjax.cost.table import Table
from mcjax.errors import ConfigError, MissingExtra

MOE = ModelShape("moe", 4, 512, 8, 2, 64, 256, 1000, experts=16, experts_per_token=2, max_context_tokens=4096)
TWO = replace(hardware("h100x8"), count=2)


class Handle:
    """Milliseconds by a formula; `spec` is what the engine was compiled from."""

    compiled: dict[str, Any]

    def __init__(self, spec: dict[str, Any]):
        Handle.compiled = spec

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        assert bs == 1
        return 1 + 0.01 * (isl - prefix) + 1e-6 * (isl - prefix) * prefix

    def decode_step_latency(self, gen_tokens: int, isl: int, osl: int) -> float:
        return 5 + 0.1 * gen_tokens + 4e-5 * gen_tokens * isl

    def mixed_step_breakdown(
        self, ctx_tokens: int, gen_tokens: int, isl: int, osl: int
    ) -> tuple[float, float, float, float]:
        shared, decode = 1 + 0.008 * (ctx_tokens + gen_tokens), 4e-5 * gen_tokens * isl
        return shared + 9 + decode, shared, 9, decode


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_engine(model_path: str, system: str, backend: str, version: str | None, **sizes: int) -> dict[str, Any]:
        if system == "unknown":
            raise ValueError("no such system")
        return {"names": (model_path, system, backend, version), **sizes}

    engine: Any = ModuleType("aiconfigurator_core.sdk.engine")
    engine.compile_engine, engine.EngineHandle = compile_engine, Handle
    for name in ("aiconfigurator_core", "aiconfigurator_core.sdk"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", engine)


def test_each_kind_is_asked_for_in_its_own_way() -> None:
    rows = measure(Handle({}), 4096)
    assert {row.kind for row in rows} == {"prefill", "decode", "mixed"}
    assert max(row.start_tokens for row in rows) >= 4096
    table = Table(rows)
    assert table.prefill_ns(1000, 3000) == pytest.approx((1 + 30 + 3) * 1e6)
    assert table.step_ns(10, 10 * 2000, 1)[0] == pytest.approx((5 + 1 + 0.8) * 1e6)
    # Chunk 1 + 20 + 2 ms, ten more tokens in the matmuls, ten contexts of 500.
    assert table.mixed_ns(1000, 2000, 10, 5000) == pytest.approx((23 + 0.08 + 0.2) * 1e6)
    assert all(isinstance(row, Measurement) for row in rows)


@pytest.mark.usefixtures("stand_in")
def test_names_and_sizes_are_handed_on() -> None:
    table = tabulate(model("qwen3-32b"), TWO)
    assert Handle.compiled == {"names": ("Qwen/Qwen3-32B", "h100_sxm", "vllm", None), "tp_size": 2}
    table.check("h100x8", "qwen3-32b")
    with pytest.raises(ConfigError, match="was measured on qwen3-32b"):
        table.check("h100x8", "llama3-8b")
    tabulate(MOE, TWO, "a/moe", "b", "sglang", "1.2")
    assert Handle.compiled == {"names": ("a/moe", "b", "sglang", "1.2"), "tp_size": 2, "moe_tp_size": 2}
    tabulate(MOE, TWO, "a/moe", "b", expert_parallel=True)
    assert Handle.compiled["moe_ep_size"] == 2


@pytest.mark.usefixtures("stand_in")
def test_unknown_pairs_name_the_key() -> None:
    with pytest.raises(ConfigError, match=r"cost\.model_path.*calls moe"):
        tabulate(MOE, TWO)
    with pytest.raises(ConfigError, match=r"cost\.system.*calls cpu"):
        tabulate(model("llama3-8b"), hardware("cpu"))
    with pytest.raises(ConfigError, match=r"cost\.system=unknown.*no such system"):
        tabulate(MOE, TWO, "a/moe", "unknown")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(MissingExtra, match=r"mcjax\[cost\]"):
        tabulate(model("qwen3-32b"), TWO)


def test_the_real_one_gives_its_published_figures() -> None:
    pytest.importorskip("aiconfigurator_core")
    table = tabulate(model("qwen3-32b"), TWO)
    assert table.prefill_ns(0, 8192) / 1e6 == pytest.approx(476, rel=0.01)  # as in published.AICONFIGURATOR
    assert table.step_ns(64, 64 * 8192, 1)[0] / 1e6 == pytest.approx(37.7, rel=0.01)
    mixed_ms = table.mixed_ns(0, 2048, 16, 16 * 2048) / 1e6
    assert max(107, 13) < mixed_ms < 107 + 13
