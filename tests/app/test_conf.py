"""Every file of `conf/` composes, can be made, and says what each key is; the experiments run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest_app import ROOT, Answer, runs
from omegaconf import OmegaConf

from mcjax.app.compose import compose, made
from mcjax.app.mistakes import locate

Command = Callable[..., Answer]
CONF = ROOT / "src" / "mcjax" / "conf"
FILES = sorted(path.relative_to(CONF).as_posix() for path in CONF.rglob("*.yaml"))
OPTIONS = [file.removesuffix(".yaml") for file in FILES if "/" in file]


def overrides_for(option: str) -> list[str]:
    group, _, name = option.rpartition("/")
    needs = {"cost/fitted": ["hardware=a800x8", "model=llama3-70b"], "model/hugging_face": ["model.path=config.json"]}
    own = [f"{group.replace('/', '.')}._target_=builtins.dict"] if name == "custom" else []
    return [f"{group}={name}", *needs.get(option, []), *own]


NEED_MORE = {
    "model/hugging_face",
    "cost/table",
    "cost/measured",
    "cost/aiconfigurator",
    *(
        f"workload/{name}"
        for name in "mooncake azure weka aiperf bailian burstgpt jsonl reblocked servegen slice superposed text".split()
    ),
}
"""Options that need a file, an inner workload, a package or a tokenizer; their own tests make them."""


@pytest.mark.parametrize("option", OPTIONS)
def test_option_composes_and_can_be_made(option: str) -> None:
    group = option.rpartition("/")[0]
    config = compose(overrides_for(option))
    assert OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    key = group.replace("/", ".")
    if group.startswith("hydra/"):
        return  # its own groups are made by Hydra, and gone from the config by now
    section = OmegaConf.select(config, key)
    if option in NEED_MORE or group == "experiment" or "_target_" not in section:
        return  # these need a file, or are no object
    if group == "backend":
        assert callable(locate("backend", section._target_))
    else:
        assert made(config, key) is not None


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


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "experiment").glob("*.yaml")))
def test_experiment_runs(mcjax: Command, place: Path, trace: Path, name: str) -> None:
    answer = mcjax(f"experiment={name}", f"workload.path={trace}", "track.sinks.0.overview=false")
    assert answer.status == 0, answer.err
    assert len(runs(place)) == (5 if name == "prefill_selections" else 1)
    assert all((directory / "DONE").exists() for directory in runs(place))
