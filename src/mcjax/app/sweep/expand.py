"""The words that stand for several runs: `+seeds=10` and `+slices=8`."""

from __future__ import annotations

from collections.abc import Sequence

from mcjax.errors import ConfigError

MULTIRUN = ("-m", "--multirun")
SEEDS, SLICES = "+seeds", "+slices"


def expanded(words: Sequence[str]) -> list[str]:
    """The words as Hydra takes them: `+seeds=N` runs over N seeds from the one given (else 0), `+slices=N` over all
    of N slices. Either makes a sweep of it, if nothing else does.

    Raises `ConfigError`, naming `seeds` or `slices`.
    """
    rest = list(words)
    seeds, slices = _taken(rest, SEEDS), _taken(rest, SLICES)
    if seeds is not None:
        first = _first_seed(rest)
        rest.append(f"seed=range({first},{first + seeds})")
    if slices is not None:
        for key in ("slices", "slice"):
            if any(_key(word) == key for word in rest):
                raise ConfigError("slices", slices, f"{SLICES} sets slices and plays every slice; leave out {key}=")
        rest += [f"slices={slices}", f"slice=range(0,{slices})"]
    asked = seeds is not None or slices is not None
    return ["-m", *rest] if asked and not any(word.startswith("-") for word in rest) else rest


def refuse_unexpanded(words: Sequence[str]) -> None:
    """Raise `ConfigError` for such a word where one run is asked for."""
    for word in words:
        for name in (SEEDS, SLICES):
            if word.startswith(f"{name}="):
                problem = "stands for several runs, here is place for one: take mcjax.sweep, or the command line"
                raise ConfigError(name[1:], word.partition("=")[2], problem)


def _taken(words: list[str], name: str) -> int | None:
    """The number that `name` is given, and `words` without it."""
    value = None
    for word in [word for word in words if _key(word) == name[1:] and word.startswith("+")]:
        words.remove(word)
        text = word.partition("=")[2]
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(name[1:], text, "must be a whole number, 1 or more")
        value = int(text)
    return value


def _first_seed(words: list[str]) -> int:
    first = 0
    for word in [word for word in words if _key(word) == "seed"]:
        words.remove(word)
        text = word.partition("=")[2]
        if not text.isdecimal():
            raise ConfigError("seeds", f"with {word}", f"{SEEDS} counts on from one seed, a whole number, 0 or more")
        first = int(text)
    return first


def _key(word: str) -> str:
    return word.lstrip("+").partition("=")[0]
