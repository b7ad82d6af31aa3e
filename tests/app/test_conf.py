"""Every file of `conf/` composes, can be made, and says what each key is; the experiments run."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from conf_options import CONF, FILES, OPTIONS, composed, make
from conftest_app import Answer, runs
from omegaconf import OmegaConf

from mcjax.app.build import track_settings
from mcjax.app.compose import plain_of
from mcjax.app.schema.check import check_kinds

Command = Callable[..., Answer]
PACKAGES = {"cost/aiconfigurator": "aiconfigurator_core", "track/wandb": "wandb", "model/smollm2": "gguf"}
"""What an option needs to be made that not everybody has."""


@pytest.mark.parametrize("option", OPTIONS)
def test_option_composes_and_can_be_made(option: str, needed: Path) -> None:
    config = composed(option, needed)
    assert OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    check_kinds(plain_of(config))
    package = PACKAGES.get(option)
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if option.startswith("track/"):
        assert len(track_settings(config).sinks) == len(config.track.sinks)
    if option.startswith("hydra/"):
        return  # its own groups are made by Hydra, and gone from the config by now
    made = make(option, config)
    section = OmegaConf.select(config, option.rpartition("/")[0].replace("/", "."))
    assert (made is None) == (section is None or "_target_" not in section), "an object comes of every _target_"


@pytest.mark.parametrize("file", FILES)
def test_every_key_is_explained(file: str) -> None:
    """On its line or the line above; a key inside an explained one needs none."""
    lines = (CONF / file).read_text().splitlines()
    assert lines[0].startswith("#"), "a file says what it is"
    explained_above = [False] * 10
    for above, line in zip(["", *lines], lines, strict=False):
        depth = (len(line) - len(line.lstrip())) // 2
        key, has_comment = line.split("#")[0].strip(), "#" in line or above.lstrip().startswith("#")
        free = key.startswith(("_target_", "_partial_", "defaults:", "- ")) or any(explained_above[:depth])
        assert has_comment or free or ":" not in key, line
        explained_above[depth:] = [has_comment or key.startswith("defaults:")] * (10 - depth)


SIMULATED = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml") if path.stem != "tiers")
"""The other one is of the real engine, and runs among the long checks (`test_tiers_real.py`)."""


LONG = {"adaptive_watermark": pytest.mark.check_long}


@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, ())) for name in SIMULATED])
def test_experiment_runs(mcjax: Command, place: Path, trace: Path, name: str) -> None:
    traces = [f"workload.path={trace}"]
    if name == "fig9_hit_rate":  # which replays traces of its own
        traces = [f"backend.traces.{each}.path={trace}" for each in ("conversation", "synthetic")]
    if name == "adaptive_watermark":  # which has two stretches of either
        parts = ("conversation", "synthetic", "both_conversation", "both_synthetic")
        traces = [f"workload.parts.{part}.{key}" for part in parts for key in (f"of.path={trace}", "start_s=0")]
    answer = mcjax(f"experiment={name}", *traces, "track.sinks.0.overview=false")
    assert answer.status == 0, answer.err
    assert len(runs(place)) == {"prefill_selections": 5, "adaptive_watermark": 10}.get(name, 1)
    assert all((directory / "DONE").exists() for directory in runs(place))
