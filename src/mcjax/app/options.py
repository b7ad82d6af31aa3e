"""How overrides are read to Hydra, and what is said of those that it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcjax.app.mistakes import close_to
from mcjax.app.sweep.expand import refuse_unexpanded


def told(overrides: Sequence[str]) -> list[str]:
    """The overrides as Hydra takes them: keys of a `custom` strategy need no `+`, `-m` may stand anywhere.

    Raises `ConfigError` for words that stand for several runs: where there may be several, they were expanded before.
    """
    refuse_unexpanded(overrides)
    own = [word.removesuffix("=custom").replace("/", ".") + "." for word in overrides if word.endswith("=custom")]
    words = [f"++{word}" if word.startswith(tuple(own)) and "=" in word else word for word in overrides]
    return sorted(words, key=lambda word: word not in ("-m", "--multirun"))


def suggest(problem: BaseException) -> None:
    """Note on an error of Hydra's which key was probably meant."""
    cause: Any = problem.__cause__
    siblings = getattr(cause, "parent_node", None)
    if siblings is not None and getattr(cause, "key", None) is not None:
        hint = close_to(str(cause.key), [str(name) for name in siblings])
        if hint:
            problem.add_note(f"{cause.full_key or cause.key}{hint}?")
