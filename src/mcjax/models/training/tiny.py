"""Both built-in models, one after the other: `mcjax train-tiny`."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from mcjax.cost import catalogue
from mcjax.errors import ConfigError
from mcjax.models import builtin
from mcjax.models.catalogue import load
from mcjax.models.training.directory import rounded, write_directory
from mcjax.models.training.loop import Learner, Progress, Trained, train
from mcjax.models.training.measure import Agreement, Guess, Measured, agreement, held_out_rows, measured
from mcjax.models.training.step import Recipe, as_function
from mcjax.models.training.text import LICENCE, Corpus

TARGET, DRAFT = "tiny", "tiny-draft"
RECIPES = {TARGET: Recipe(steps=1800), DRAFT: Recipe(steps=900, learning_rate=3e-3, taught=0.5)}
TARGET_SHARE = 0.7
"""Of the time: the draft is smaller."""


def train_both(
    folder: Path,
    text: Corpus,
    tell: Callable[[Progress], None],
    steps: int | None = None,
    seed: int = 0,
    minutes: float = math.inf,
    resume: bool = False,
    rows: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Writes `FOLDER/tiny` and `FOLDER/tiny-draft`. Returns their cards by name.

    `steps` None: as the recipes say. `rows`: of what is held out, for measuring; None: all. Raises `ConfigError` for a
    state that does not fit.
    """
    begun = time.monotonic()
    teacher: Guess | None = None
    cards: dict[str, dict[str, Any]] = {}
    for name, recipe in RECIPES.items():
        recipe = replace(recipe, seed=seed, steps=steps or recipe.steps)
        learner = Learner(name, catalogue.model(name), recipe, folder)
        until = begun + 60 * minutes * (TARGET_SHARE if name == TARGET else 1)
        trained = train(learner, text, tell, resume, until, teacher)
        guess = partial(trained.logits, rounded(trained.parameters))
        held_out = held_out_rows(text, rows)
        results: dict[str, Any] = {"held_out": asdict(measured(guess, held_out))}
        if teacher is not None:
            results["agreement"] = asdict(agreement(teacher, guess, held_out))
        cards[name] = _card(learner, text, trained) | results
        write_directory(learner.directory, learner.shape, trained.parameters, cards[name])
        teacher = guess
    return cards


def _card(learner: Learner, text: Corpus, trained: Trained) -> dict[str, Any]:
    recipe = learner.recipe
    words = ["mcjax train-tiny"]
    words += [f"--steps {recipe.steps}"] if recipe.steps != RECIPES[learner.name].steps else []
    words += [f"--seed {recipe.seed}"] if recipe.seed else []
    return {
        "model": learner.name,
        "parameters": learner.shape.parameters,
        "command": " ".join(words),
        "steps": trained.step,
        "recipe": asdict(recipe),
        "text": {
            "origin": f"docstrings and help topics of CPython {platform.python_version()}",
            "licence": LICENCE,
            "digest": text.digest,
            "training_tokens": text.training.size,
            "held_out_bytes": text.held_out_bytes,
            **({"parts": text.parts} if learner.name == TARGET else {}),
        },
    }


def shipped(text: Corpus, rows: int | None = None) -> tuple[dict[str, Measured], Agreement]:
    """Of both models as they ship, and of the random weights that have the same shape (`random`)."""
    held_out = held_out_rows(text, rows)
    found: dict[str, Guess] = {}
    for name in (TARGET, DRAFT):
        shape = catalogue.model(name)
        params, logits = as_function(load(shape, max_positions=shape.max_context_tokens).model)
        found[name] = partial(logits, params)
    params, logits = as_function(builtin.build())
    results = {name: measured(guess, held_out) for name, guess in {**found, "random": partial(logits, params)}.items()}
    return results, agreement(found[TARGET], found[DRAFT], held_out)


def checked(steps: int | None, minutes: float | None) -> None:
    """Raises `ConfigError` for limits that leave nothing to train."""
    if steps is not None and steps < 1:
        raise ConfigError("--steps", steps, "must be positive")
    if minutes is not None and not minutes > 0:
        raise ConfigError("--minutes", minutes, "must be positive")
