"""Finds kept code again: modules below a run's `strategies/` in the place of what lies elsewhere now."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from mcjax.app.own_code.source import Unknown


def found(name: str) -> Any:
    """What `my_policy:Mine`, or the module `my_policy`, names. Raises `Unknown`."""
    module, _, path = name.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in path.split(".") if path else ():
            value = getattr(value, part)
    except (ImportError, AttributeError) as problem:
        raise Unknown(f"{name} cannot be found again ({problem})") from None
    return value


@contextlib.contextmanager
def kept_modules(folder: Path, names: Sequence[str]) -> Generator[None]:
    """While this lasts, the modules `names` are imported from `folder` alone; then everything is as it was."""
    tops = {name.partition(".")[0] for name in names}
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in tops}
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # a run directory is not written to
    try:
        yield
    finally:
        sys.dont_write_bytecode = written
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
            del sys.modules[name]
        sys.modules.update(before)
