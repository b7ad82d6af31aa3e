"""The adaptive watermark beside fixed ones where traffic changes its character: minutes, so with `-m check_long`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mcjax
from mcjax.app.compose import compose, plain_value

PARTS = {"conversation": "conversation", "synthetic": "synthetic"}
PARTS |= {"both_conversation": "conversation", "both_synthetic": "synthetic"}


def levels_swept() -> list[str]:
    """The values of `kvpool.watermark` that the experiment sweeps over."""
    import yaml

    path = Path(mcjax.__file__).parent / "conf" / "experiment" / "adaptive_watermark.yaml"
    values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    (swept,) = values["hydra"]["sweeper"]["params"].values()
    return [f"{value.strip().lstrip(',').strip()}}}" for value in str(swept).split("}")[:-1]]


def test_the_experiment_sweeps_fixed_levels_beside_the_adaptive_one() -> None:
    watermarks = [
        plain_value(compose(["experiment=adaptive_watermark", f"++kvpool.watermark={level}"]).kvpool.watermark)
        for level in levels_swept()
    ]
    adaptive, *static = watermarks
    assert adaptive == {"_target_": "mcjax.kvpool.watermark.adaptive.Adaptive"}
    assert [watermark["low"] for watermark in static] == [watermark["high"] for watermark in static]
    assert [watermark["high"] for watermark in static] == [0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0]


@pytest.mark.check_long
@pytest.mark.timeout(3600)
def test_no_fixed_level_has_prompts_answered_sooner(trace_paths: dict[str, Path]) -> None:
    files = [f"workload.parts.{part}.of.path='{trace_paths[trace]}'" for part, trace in PARTS.items()]

    def summary(level: str) -> dict[str, Any]:
        overrides = ["experiment=adaptive_watermark", f"++kvpool.watermark={level}", "track=none", *files]
        return dict(mcjax.run(overrides, progress=False).summary)

    adaptive, *static = [summary(level) for level in levels_swept()]
    for part in ("mean", "p90"):
        assert adaptive["ttft_s"][part] < min(each["ttft_s"][part] for each in static)
    assert adaptive["requests"]["completed"] == adaptive["requests"]["submitted"]
