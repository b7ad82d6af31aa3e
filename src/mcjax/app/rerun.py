"""`mcjax rerun RUN`: repeat a run exactly, from its own config, code and inputs, and say whether it comes out the same.

The user's own code is taken from the run's `strategies/`, not from where it lies now: only rerun what you would run.
A virtual run is compared by its digest. Times of a real run differ by nature: its outputs are compared token by token.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from mcjax.app.inputs import sha256_of
from mcjax.app.own_code.again import Again
from mcjax.app.own_code.collect import main_module
from mcjax.app.own_code.importing import found, kept_modules
from mcjax.app.own_code.source import Unknown
from mcjax.app.plugins import Plugins
from mcjax.app.provenance import Origin, code_tree
from mcjax.app.replay import first_difference
from mcjax.app.run import execute, outside_loops
from mcjax.errors import RunError, VerificationError
from mcjax.track.console import hidden, shown
from mcjax.track.find import find_one
from mcjax.track.redaction import REDACTED
from mcjax.track.run import Run, load
from mcjax.track.schemas import DIGESTED
from mcjax.track.sinks.files import Files

AGREES, DIFFERS, CANNOT = 0, 1, 2
"""Exit statuses."""
SHOWN = 5


@dataclass(slots=True)
class Repeated:
    """A run and its repetition. `changed` is what was not as it had been: code, packages, strategies."""

    run: Run
    again: Run
    compared: str
    differences: list[str]
    changed: list[str] = field(default_factory=list[str])

    @property
    def agrees(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        changed = [f"changed since: {line}" for line in self.changed]
        verdict = "agrees" if self.agrees else "DIFFERS"
        lines = [*changed, f"{self.compared} of {self.again.directory} {verdict}", *self.differences]
        return "\n".join(lines)


def rerun(run: Run, progress: bool = False, **strategies: Any) -> Repeated:
    """Repeat a finished run; `strategies` are objects for those that cannot be made again from its record.

    Raises `RunError` for a run that cannot be repeated: it did not end, an input file is gone or has changed, a secret
    was left out of what it keeps, or an object has to be given.
    """
    directory = run.directory
    if directory is None:
        raise RunError("a run that was kept nowhere (track=none) cannot be repeated")
    if run.state != "done":
        raise RunError(f"{directory}: it did not end by itself ({run.reason}), so there is nothing to compare with")
    config = _config(run, directory)
    _check_inputs(run)
    record = run.record
    origin = Origin(["mcjax", "rerun", directory.name], record.choices)
    with kept_modules(directory / "strategies", _modules(directory)):
        plugins = Plugins({**_made(run, directory, strategies), **strategies})
        again = outside_loops(lambda: execute(OmegaConf.create(config), plugins, origin, shown if progress else hidden))
    changed = _changed(run, again)
    if again.state != "done":
        raise RunError(f"{again.directory}: the repetition did not end by itself ({again.reason})")
    if record.backend == "jax":
        counted, differences = _outputs(run, again)
        compared = f"real times differ by nature; every output token ({counted})"
    else:
        mine, other = str(run.summary.get("digest", "")), str(again.summary.get("digest", ""))
        compared, differences = f"the digest {mine[:12]}", [] if mine == other else _rows(run, again)
    return Repeated(run, again, compared, differences, changed)


def _config(run: Run, directory: Path) -> dict[str, Any]:
    """The run's own config, to be kept beside it. Only files are written: no tracker hears of a repetition."""
    config = copy.deepcopy(run.config)
    hidden = [key for key, value in run.record.config.items() if REDACTED in str(value)]
    if hidden:
        raise RunError(f"{directory}: {', '.join(hidden)} held a secret, which was not kept; run it again as you did")
    config.pop("plugins", None)
    overview = (directory / "overview.png").exists()
    files = f"{Files.__module__}.{Files.__qualname__}"
    config["track"]["sinks"] = [{"_target_": files, "directory": str(directory.parent), "overview": overview}]
    return {**config, "rerun": True}


def _check_inputs(run: Run) -> None:
    wrong: list[str] = []
    for name, sha256 in run.record.inputs.items():
        path = Path(name)
        if not path.exists():
            wrong.append(f"{name} is not there")
        elif sha256_of(path) != sha256:
            wrong.append(f"{name} has changed (it was sha256 {sha256[:12]}...)")
    if wrong:
        where = "names are as they were given, seen from where it ran"
        raise RunError(f"{run.directory}: its inputs are not what they were: {'; '.join(wrong)} ({where})")


def _modules(directory: Path) -> list[str]:
    """The modules that are kept with a run."""
    kept = directory / "strategies"
    parts = [path.relative_to(kept).with_suffix("").parts for path in sorted(kept.rglob("*.py"))]
    return [".".join(part[:-1] if part[-1] == "__init__" else part) for part in parts]


def _made(run: Run, directory: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The objects that a run was given from Python, made again. Raises `RunError` naming those that cannot be."""
    made: dict[str, Any] = {}
    lacking: dict[str, str] = {}
    main: list[str] = []

    def find_kept(name: str) -> Any:
        module, _, path = name.partition(":")
        return found(f"{main[-1]}:{path}" if module == "__main__" else name)

    again = Again(find_kept)
    for place, name in cast("dict[str, str]", run.config.get("plugins") or {}).items():
        if place in given:
            continue
        try:
            kept: dict[str, Any] = json.loads((directory / "strategies" / f"{place}.json").read_text(encoding="utf-8"))
            if kept["unknown"]:
                raise Unknown(kept["unknown"][0])
            main.append(kept["main"])
            made[place] = again.made(kept["made"])
        except (OSError, ValueError, KeyError, Unknown) as problem:
            lacking[place] = f"{place}={name}() ({problem})"
        except Exception as problem:  # the user's own code raises as it is imported
            lacking[place] = f"{place}={name}() ({type(problem).__name__}: {problem})"
    if lacking:
        words = ", ".join(lacking.values())
        raise RunError(f"{directory}: objects given from Python have to be given again, mcjax.rerun(run, {words})")
    return made


def _changed(run: Run, again: Run) -> list[str]:
    """What is not as it was: our code, the user's own, Python and packages."""
    mine, other = run.record, again.record
    lines: list[str] = []
    if not mine.code:
        lines.append("its own record does not say which code it ran")
    elif mine.code != code_tree():
        lines.append(f"mcjax's code ({mine.code[:12]}, now {code_tree()[:12]})")
    for place in mine.strategies.keys() | other.strategies.keys():
        one, two = mine.strategies.get(place), other.strategies.get(place)
        if one is None or two is None:
            lines.append(f"{place}: own code where there was none, or none where there was")
        elif one.sha256 != two.sha256 and f"strategies/{main_module(place)}.py" not in one.files:
            lines.append(f"{place}: the code or parameters of {one.name}")
    before, now = _environment(run), _environment(again)
    packages = {**dict.fromkeys(before), **dict.fromkeys(now)}
    lines += [
        f"{name} {before.get(name)}, now {now.get(name)}" for name in packages if before.get(name) != now.get(name)
    ]
    return lines


def _environment(run: Run) -> dict[str, str]:
    """Python's version and those of packages."""
    assert run.directory is not None
    try:
        kept: dict[str, Any] = json.loads((run.directory / "environment.json").read_text(encoding="utf-8"))
        return {"python": str(kept.get("python")), **cast("dict[str, str]", kept.get("packages", {}))}
    except (OSError, ValueError, AttributeError):
        return {}


def _rows(run: Run, again: Run) -> list[str]:
    """The first row of each table that differs."""
    differing: list[str] = []
    for name in DIGESTED:
        difference = first_difference(name, run.table(name), again.table(name))
        if difference is not None:
            where = f"  {name} row {difference.row}, {difference.column}"
            differing.append(f"{where}: {difference.logged!r}, now {difference.replayed!r}")
    return differing or ["  every row is equal, but the recorded digest is another: the tables were changed afterwards"]


_COMPARED = ("request_id", "state", "output", "output_tokens")


def _outputs(run: Run, again: Run) -> tuple[str, list[str]]:
    """How much was compared, and the first token of each request that differs. Raises `RunError` without tokens."""
    sides = [
        {row["request_id"]: row for row in each.columns("requests", *_COMPARED).to_pylist()} for each in (run, again)
    ]
    mine, other = sides
    if any(row["output_tokens"] and not row["output"] for row in mine.values()):
        raise RunError(f"{run.directory}: its tokens were not kept (track.level)")
    differences: list[str] = []
    for request in sorted(mine.keys() | other.keys()):
        one, two = mine.get(request), other.get(request)
        if one is None or two is None or one["state"] != two["state"]:
            states = [row["state"] if row else "absent" for row in (one, two)]
            differences.append(f"  request {request}: {states[0]}, now {states[1]}")
        elif one["output"] != two["output"]:
            differences.append(f"  request {request}, {_first_token(one['output'], two['output'])}")
    tokens = sum(len(row["output"] or ()) for row in mine.values())
    if len(differences) > SHOWN:
        differences = [*differences[:SHOWN], f"  and {len(differences) - SHOWN} more requests"]
    return f"{tokens} of {len(mine)} requests", differences


def _first_token(one: Sequence[int], two: Sequence[int]) -> str:
    for at, (mine, other) in enumerate(zip(one, two, strict=False)):
        if mine != other:
            return f"token {at}: {mine}, now {other}"
    return f"{len(one)} tokens, now {len(two)}"


def command(arguments: Sequence[str]) -> int:
    """Exit status 0 if it comes out the same, 1 if not, 2 if it cannot be repeated."""
    parser = argparse.ArgumentParser("mcjax rerun", description=__doc__)
    parser.add_argument("run", help="a run: its directory, its name below runs/, or the first digits of its key")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    try:
        repeated = rerun(load(find_one(options.run)), progress=sys.stdout.isatty())
    except Exception as problem:
        if options.debug:
            raise
        from mcjax.app.command import explain

        print(f"mcjax: {explain(problem)}", file=sys.stderr)
        return DIFFERS if isinstance(problem, VerificationError) else CANNOT
    print(repeated)
    return AGREES if repeated.agrees else DIFFERS
