"""`mcjax plot RUNS... kind=ttft_cdf out=fig.pdf`: figures for a paper, and their numbers as CSV beside them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mcjax.app.mistakes import close_to
from mcjax.errors import ConfigError, McjaxError, RunError
from mcjax.track.find import find
from mcjax.track.plots.drawn import PRINT_DPI, SUFFIXES
from mcjax.track.plots.kinds import KINDS, OPTIONS, draw
from mcjax.track.runs import Runs, load_all

OWN_KEYS = ("kind", "out", "dpi")
EPILOG = "\n".join(
    [
        "kinds:",
        *(f"  {kind.name:<10} {kind.title.lower()}" for kind in KINDS.values()),
        "",
        "keys:",
        "  kind=A,B       which figures",
        f"  out=FILE       {', '.join(SUFFIXES)}; a folder, or a stem, of several kinds (default: KIND.pdf)",
        "  width=column   3.33 inches; page is 7",
        "  title=TEXT     above the figure",
        "  dpi=300        of a .png",
        "  from_s=, to_s= the stretch of run time (kinds over time)",
        "  x=, y=         pareto: two metrics, such as ttft_s.p90; goodput, hit_rate: x is the swept number",
    ]
)


def command(arguments: Sequence[str]) -> int:
    """Exit status 0, or 2 for runs or keys that cannot be drawn."""
    parser = argparse.ArgumentParser(
        "mcjax plot", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="+", metavar="RUN|SWEEP|key=value", help="directories, names, keys, patterns")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    try:
        references, keys = split(options.words)
        kinds = kinds_of(keys.pop("kind", ""))
        keys_of_kinds(keys, kinds)
        runs = runs_of(references)
        told: set[str] = set()
        for kind, path in zip(kinds, paths_of(keys.pop("out", ""), kinds), strict=True):
            drawn = draw(runs, kind, **{key: value for key, value in keys.items() if key != "dpi"})
            told.update(drawn.missing)
            for written in drawn.save(path, _dpi(keys.get("dpi", str(PRINT_DPI)))):
                print(written)
        for line in sorted(told):
            print(f"mcjax: not drawn: {line}", file=sys.stderr)
    except McjaxError as problem:
        if options.debug:
            raise
        print(f"mcjax: {problem}", file=sys.stderr)
        return 2
    return 0


def split(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The runs, and the keys. What lies there is a run, whatever its name. Raises `ConfigError`."""
    references: list[str] = []
    keys: dict[str, str] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or Path(word).exists():
            references.append(word)
        elif key in keys:
            raise ConfigError(key, value, "is there twice")
        else:
            keys[key] = value
    if not references:
        raise ConfigError("runs", "", "name at least one run or sweep (`mcjax ls` lists them)")
    return references, keys


def kinds_of(value: str) -> list[str]:
    """`ttft_cdf,pareto` as names. Raises `ConfigError` for one that is none."""
    names = [name for name in value.split(",") if name]
    if not names:
        raise ConfigError("kind", value, "which figure is it to be", KINDS)
    for name in names:
        if name not in KINDS:
            raise ConfigError("kind", name, f"no such kind{close_to(name, KINDS)}", KINDS)
    return list(dict.fromkeys(names))


def keys_of_kinds(keys: Mapping[str, str], kinds: Iterable[str]) -> None:
    """Raise `ConfigError` for a key that some kind does not take."""
    for kind in kinds:
        allowed = (*OWN_KEYS, *OPTIONS, *KINDS[kind].options)
        for key, value in keys.items():
            if key not in allowed:
                raise ConfigError(key, value, f"kind={kind} takes no {key}{close_to(key, allowed)}", allowed)


def runs_of(references: Sequence[str]) -> Runs:
    """The runs that are meant. Raises `RunError`, with the reasons, if none can be read."""
    found = find(references)
    runs = load_all(found.directories, found.sweeps[0] if len(found.sweeps) == 1 else None)
    if not len(runs):
        reasons = "".join(f"\n  {reason}" for _, reason in runs.refused)
        raise RunError(f"{' '.join(references)}: no run that can be read{reasons}")
    return runs


def paths_of(out: str, kinds: Sequence[str]) -> list[Path]:
    """`out` of one kind is its file; of several, the kind's name is added, or `out` is the folder that they go to."""
    path = Path(out)
    if path.suffix:
        if len(kinds) == 1:
            return [path]
        return [path.with_name(f"{path.stem}_{kind}{path.suffix}") for kind in kinds]
    return [path / f"{kind}.pdf" for kind in kinds]


def _dpi(value: str) -> int:
    if not value.isdigit() or not 50 <= int(value) <= 1200:
        raise ConfigError("dpi", value, "must be 50 to 1200 dots an inch")
    return int(value)
