"""Whose code a module is: ours, Python's, an installed package's, or the user's own."""

from __future__ import annotations

import functools
import importlib.util
import site
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import Literal

Home = Literal["ours", "python", "installed", "own", "loose", "unknown"]
"""`own` is a file that can be imported; `loose` has no such file (a notebook, `python -c`, the script that runs)."""


@functools.cache
def _folders() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Folders of Python itself, and of installed packages, which may lie inside them."""
    python = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    packages = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    packages.update(site.getsitepackages(), [site.getusersitepackages()])
    return tuple(sorted(_real(path) for path in python)), tuple(sorted(_real(path) for path in packages))


def _real(path: str) -> str:
    return str(Path(path).resolve()) + "/"


def home_of(name: str) -> Home:
    """Whose the module of this name is."""
    top = name.partition(".")[0]
    if top == "mcjax":
        return "ours"
    if name == "__main__":
        return "loose"
    if top in sys.stdlib_module_names or name in sys.builtin_module_names:
        return "python"
    file = file_of(name)
    if file is None:
        return "loose" if name in sys.modules else "unknown"
    return home_of_file(file)


def home_of_file(file: Path) -> Home:
    where = str(file.resolve())
    python, packages = _folders()
    if where.startswith(packages):
        return "installed"
    if where.startswith(python):
        return "python"
    return "own"


def file_of(name: str) -> Path | None:
    """The file of a module, imported or not; None for one that has none, and where there is no such module."""
    module = sys.modules.get(name)
    if module is not None:
        file = getattr(module, "__file__", None)
        return Path(file) if file else _folder_of(module)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    if spec.origin and spec.has_location:
        return Path(spec.origin)
    found = list(spec.submodule_search_locations or ())
    return Path(found[0]) if found else None


def _folder_of(module: ModuleType) -> Path | None:
    """Of a package without `__init__.py`."""
    found = list(getattr(module, "__path__", ()))
    return Path(found[0]) if found else None


@functools.cache
def version_of(top: str) -> str:
    """Name and version of the installed distribution that brings the top module `top`."""
    try:
        return f"{top} {version(top)}"
    except PackageNotFoundError:
        names = sorted(set(packages_distributions().get(top, ())))
        return ", ".join(f"{name} {version(name)}" for name in names) or f"{top} of no known version"
