"""Training from first to last step: progress, states to resume from, and the files that come out."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from safetensors import safe_open
from safetensors.flax import save_file

from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from mcjax.models.training.step import Logits, Recipe, trainer, untrained
from mcjax.models.training.text import Corpus

STATE_EVERY_S = 60.0
REPORT_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Of one model. The loss is the mean since the last report, in bits a token."""

    name: str
    step: int
    steps: int
    loss_bits: float
    left_s: float


@dataclass(frozen=True, slots=True)
class Learner:
    """A model being trained: what it is, and where its files go (`FOLDER/NAME`)."""

    name: str
    shape: ModelShape
    recipe: Recipe
    folder: Path

    @property
    def directory(self) -> Path:
        return self.folder / self.name

    @property
    def state(self) -> Path:
        """Beside the directory, which is for others to read."""
        return self.folder / f"{self.name}.state"

    def asked(self, text: Corpus) -> dict[str, str]:
        """What a state must have come from to go on from it here."""
        return {
            "shape": json.dumps(self.shape.identity(), sort_keys=True),
            "recipe": json.dumps(asdict(self.recipe) | {"steps": ""}, sort_keys=True),
            "text": text.digest,
        }


@dataclass(frozen=True, slots=True)
class Trained:
    """Parameters by name after `step` steps, and the model as a function of them."""

    parameters: dict[str, Array]
    logits: Logits
    step: int


def train(
    learner: Learner,
    text: Corpus,
    tell: Callable[[Progress], None],
    resume: bool = False,
    until_s: float = math.inf,
    teacher: Callable[[Array, Array], Array] | None = None,
) -> Trained:
    """All steps that are left, or as many as end before `until_s` (of `time.monotonic`).

    The state is written every minute and at the end: an interrupted training goes on where it was, bit for bit. Raises
    `ConfigError` for a state that came from another text, recipe or shape.
    """
    recipe = learner.recipe
    params, logits = untrained(learner.shape, recipe)
    optimizer = recipe.optimizer().init(params)
    first = 0
    if resume and learner.state.is_file():
        params, optimizer, first = _restored(learner, text, params, optimizer)
    step = trainer(recipe, logits, teacher)
    begun = reported = stored = time.monotonic()
    losses: list[Array] = []
    at = first
    while at < recipe.steps and time.monotonic() < until_s:
        params, optimizer, loss = step(params, optimizer, *recipe.batch(text.training, at))
        losses.append(loss)
        at += 1
        jax.block_until_ready(loss)  # or a queue of steps grows, and no clock here means anything
        now = time.monotonic()
        if now - reported >= REPORT_EVERY_S or at == recipe.steps:
            mean = float(jnp.stack(losses).mean()) / math.log(2)
            tell(Progress(learner.name, at, recipe.steps, mean, (now - begun) / (at - first) * (recipe.steps - at)))
            losses, reported = [], now
        if now - stored >= STATE_EVERY_S:
            _store(learner, text, params, optimizer, at)
            stored = now
    _store(learner, text, params, optimizer, at)
    return Trained(params, logits, at)


def _named(params: dict[str, Array], optimizer: Any) -> dict[str, Array]:
    leaves = jax.tree_util.tree_flatten_with_path(optimizer)[0]
    moments = {f"optimizer{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}
    return {f"parameters.{name}": value for name, value in params.items()} | moments


def _store(learner: Learner, text: Corpus, params: dict[str, Array], optimizer: Any, step: int) -> None:
    learner.folder.mkdir(parents=True, exist_ok=True)
    write(
        learner.state,
        _named(params, optimizer),
        learner.asked(text) | {"step": str(step), "steps": str(learner.recipe.steps)},
    )


def write(path: Path, tensors: dict[str, Array], metadata: dict[str, str]) -> None:
    """A safetensors file, at once whole under its name."""
    beside = path.with_name(f".{path.name}.part")
    save_file(dict(sorted(tensors.items())), str(beside), metadata)
    beside.chmod(0o644)
    os.replace(beside, path)


def _restored(learner: Learner, text: Corpus, params: dict[str, Array], optimizer: Any) -> tuple[Any, Any, int]:
    try:
        with safe_open(str(learner.state), "flax") as file:
            metadata = file.metadata() or {}
            for key, value in learner.asked(text).items():
                if metadata.get(key) != value:
                    raise ConfigError("--resume", learner.state, f"was trained with another {key}; leave --resume out")
            step, steps = int(metadata["step"]), int(metadata["steps"])
            if steps != learner.recipe.steps and step > min(
                learner.recipe.first_steps, replace(learner.recipe, steps=steps).first_steps
            ):
                problem = f"is at step {step}, past those that do not depend on --steps; it was trained for {steps}"
                raise ConfigError("--steps", learner.recipe.steps, problem)
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as problem:
        raise ConfigError("--resume", learner.state, f"cannot be read: {problem}") from None
    flat, shape = jax.tree_util.tree_flatten_with_path(optimizer)
    leaves = [found[f"optimizer{jax.tree_util.keystr(path)}"] for path, _ in flat]
    return (
        {name: found[f"parameters.{name}"] for name in params},
        jax.tree_util.tree_unflatten(shape, leaves),
        step,
    )
