"""SLO policies, and the configs that choose them and the trackers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

import mcjax.track
from mcjax.cost.slo import Fixed, Relative, SLOPolicy
from mcjax.errors import ConfigError
from mcjax.types import SLO, Request

CONF = Path(mcjax.track.__file__).parents[1] / "conf"


class Linear:
    """1 us a prompt token; a decode step takes 1 ms and 10 ns a token of context."""

    name = "linear"

    def prefill_ns(self, start_tokens: int, length_tokens: int) -> int:
        return 1000 * length_tokens

    def step_ns(self, batch: int, context_tokens: int, steps: int) -> NDArray[np.int64]:
        return np.full(steps, 1_000_000 + 10 * context_tokens, np.int64)

    def mixed_ns(self, start_tokens: int, length_tokens: int, batch: int, context_tokens: int) -> int:
        raise NotImplementedError

    def decode_s(self, batch: NDArray[np.int64], context_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        raise NotImplementedError

    def prefill_s(self, prompt_tokens: int, reused_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        raise NotImplementedError


def test_relative_multiplies_the_unloaded_values() -> None:
    policy: SLOPolicy = Relative(10.0, 5.0)
    assert policy.bounds(Request(1, 0, 1000, 8), Linear()) == SLO(ttft_s=0.01, tbt_s=0.00505)


def test_fixed_is_the_same_for_all() -> None:
    assert Fixed(30.0, 0.1).bounds(Request(1, 0, 9, 8), Linear()) == SLO(30.0, 0.1)


@pytest.mark.parametrize("made", [lambda: Relative(ttft_factor=0.0), lambda: Fixed(1.0, float("nan"))])
def test_bounds_are_positive(made: Any) -> None:
    with pytest.raises(ConfigError, match=r"slo\.t.*more than 0"):
        made()


def build(node: Any) -> Any:
    """What Hydra's instantiate does, for the plain shapes used here."""
    if isinstance(node, list):
        return [build(item) for item in node]
    if isinstance(node, dict) and "_target_" in node:
        module, _, name = node["_target_"].rpartition(".")
        return getattr(importlib.import_module(module), name)(
            **{key: build(node[key]) for key in node if key != "_target_"}
        )
    return {key: build(item) for key, item in node.items()} if isinstance(node, dict) else node


@pytest.mark.parametrize(
    ("name", "expected"),
    [("relative", Relative(10.0, 5.0)), ("paper", Fixed(30.0, 0.1)), ("none", Fixed(float("inf"), float("inf")))],
)
def test_slo_configs(name: str, expected: object) -> None:
    assert build(yaml.safe_load((CONF / "slo" / f"{name}.yaml").read_text())) == expected


@pytest.mark.parametrize(
    ("name", "sinks"),
    [("files", ["Files"]), ("wandb", ["Files", "Wandb"]), ("tensorboard", ["Files", "TensorBoard"]), ("none", [])],
)
def test_track_configs(name: str, sinks: list[str]) -> None:
    from mcjax.track.tracker import Settings

    made = Settings(**build(yaml.safe_load((CONF / "track" / f"{name}.yaml").read_text())))
    assert [type(sink).__name__ for sink in made.sinks] == sinks
