"""The input files of a config: which values name one, and what the files hold."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from mcjax.cost.model_shape import weights_beside
from mcjax.errors import ConfigError
from mcjax.models import digests
from mcjax.models.checkpoint import PACKAGE, locate
from mcjax.workload.files import places

FILES = ("path", "checkpoint")
"""Keys of our own classes that name an input file: what it holds counts, and not what it is called."""
OWN = f"{PACKAGE}mcjax/"
"""What ships with mcjax is no input of anyone's; but a run with other weights is another run."""
SALTS = "MCJAX_TENANT_SALTS_FILE"
LONGEST_NAME = 1024


@dataclass(slots=True)
class Inputs:
    """What was found: by config key what stands for the file there, and by path the sha256 of each."""

    by_key: dict[str, str] = field(default_factory=dict[str, str])
    by_path: dict[str, str] = field(default_factory=dict[str, str])


def inputs_of(config: Mapping[str, Any]) -> Inputs:
    """The files that a plain config names, and the salts of tenants. A name that leads nowhere is left for the run.

    In sections of the user's own classes every text that names a file counts, beside that text.
    """
    found = Inputs()
    for key, value, section in _texts(config, "", {}):
        target = str(section.get("_target_", ""))
        name = key.rpartition(".")[2]
        ours = target.startswith("mcjax.")
        if key.partition(".")[0] in ("track", "hydra") or name.startswith("_") or (ours and name not in FILES):
            continue
        if not target:
            continue
        path = located(value, folders=name in FILES)
        if path is None:
            continue
        path = _meant(path, section)
        sha256 = sha256_of(path)
        if sha256:
            if not value.startswith(OWN):
                found.by_path[str(path)] = sha256
            by_name = "" if ours else value
            found.by_key[key] = f"{by_name}{path.suffix.lower()} {sha256}{_called(path, target, section)}"
    salts = os.environ.get(SALTS)
    if salts and Path(salts).is_file():  # the names of blocks depend on it; its hash is not written anywhere
        found.by_key[SALTS] = sha256_of(Path(salts))
    return found


def located(text: str, folders: bool = False) -> Path | None:
    """The file that a text names: as given, below `$MCJAX_TRACES`, below `./traces`, or inside a package."""
    if not text or len(text) > LONGEST_NAME or "\n" in text or "\0" in text:
        return None
    if text.startswith(PACKAGE):
        try:
            return locate(text)
        except ConfigError:
            return None
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # `~name` of nobody's home
        return None
    for candidate in places(path):
        try:
            if candidate.is_file() or (folders and candidate.is_dir()):
                return candidate
        except OSError:
            return None
    return None


def hashed(text: str) -> tuple[str, str] | None:
    """The file that a text names, and its sha256."""
    path = located(text)
    sha256 = "" if path is None else sha256_of(path)
    return (str(path), sha256) if sha256 else None


def sha256_of(path: Path) -> str:
    """Of a file; of a folder, over the names and contents of all files below it. "" for what cannot be read.

    A file that has not changed is read once a process.
    """
    try:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
            parts = [f"{file.relative_to(path).as_posix()} {sha256_of(file)}" for file in files]
            return hashlib.sha256("\n".join(parts).encode()).hexdigest()
        status = path.stat()
        return _sha256(str(path.resolve()), status.st_size, status.st_mtime_ns)
    except OSError:
        return ""


@functools.cache
def _sha256(path: str, size: int, changed_ns: int) -> str:
    return digests.sha256_of([Path(path)])[0]  # which keeps those of large files from run to run


def _meant(path: Path, section: Mapping[str, Any]) -> Path:
    """Of a model's folder only its config.json is read, unless its weights are."""
    if not path.is_dir() or not str(section.get("_target_", "")).endswith(".ModelShape.read"):
        return path
    weights = section.get("checkpoint") is None and weights_beside(path / "config.json")
    return path if weights else path / "config.json"


def _called(path: Path, target: str, section: Mapping[str, Any]) -> str:
    """A model without a name gets that of its folder."""
    if target.endswith(".ModelShape.read") and not section.get("name"):
        folder = path if path.is_dir() else path.parent
        return f" {folder.resolve().name}"
    return ""


def _texts(value: Any, key: str, section: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Every text with its key and the section of the class that it is an argument of."""
    if isinstance(value, Mapping):
        values = cast("Mapping[str, Any]", value)
        section = values if "_target_" in values else section
        for name, item in values.items():
            yield from _texts(item, f"{key}.{name}" if key else str(name), section)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _texts(item, f"{key}[{index}]", section)
    elif isinstance(value, str):
        yield key, value, section
