"""`python profiled_run.py TARGET OVERRIDES`: one run under cProfile; own seconds and calls of each function as JSON."""

from __future__ import annotations

import cProfile
import json
import pstats
import sys
import time
from pathlib import Path
from typing import Any


def named(place: tuple[str, int, str]) -> str:
    """`sched/state.py: view` for a function of mcjax, the path within its package or the file for any other."""
    file, _, function = place
    parts = Path(file).parts
    for package in ("mcjax", "site-packages"):
        if package in parts:
            last = len(parts) - 1 - parts[::-1].index(package)
            return f"{'/'.join(parts[last + 1 :])}: {function}"
    return f"{parts[-1]}: {function}"


def main(target: str, overrides: list[str]) -> None:
    import mcjax

    profile = cProfile.Profile(time.process_time, builtins=False)  # a builtin counts as part of its caller
    profile.enable()
    mcjax.run([*overrides, "rerun=true"], progress=False)
    profile.disable()
    own: dict[str, dict[str, float]] = {}
    statistics: dict[Any, Any] = pstats.Stats(profile).stats  # pyright: ignore[reportAttributeAccessIssue]
    for place, (_, calls, own_s, _, _) in statistics.items():
        row = own.setdefault(named(place), {"own_s": 0.0, "calls": 0.0})
        row["own_s"] += own_s
        row["calls"] += calls
    Path(target).write_text(json.dumps(own))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
