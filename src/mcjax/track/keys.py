"""Which runs have a key: `runs/.keys/RUN_KEY` names their directories, so that none is searched for."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = ".keys"


def add(base: Path, run_key: str, name: str) -> None:
    """Note that `base/name` is a run of this key, finished or not.

    One short write to the end of the file: processes that do so at once get a line each. Raises `OSError`.
    """
    folder = base / FOLDER
    folder.mkdir(exist_ok=True)
    file = os.open(folder / run_key, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(file, f"{name}\n".encode())
    finally:
        os.close(file)


def directories(base: Path, run_key: str) -> list[Path]:
    """The directories that were noted and still are there, the newest first; what they hold is not looked at."""
    try:
        names = (base / FOLDER / run_key).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    own = [name for name in dict.fromkeys(reversed(names)) if name and Path(name).name == name]
    return [base / name for name in own if (base / name).is_dir()]


def starting(base: Path, digits: str) -> list[str]:
    """The noted keys that begin so, in order."""
    try:
        return sorted(name for name in os.listdir(base / FOLDER) if name.startswith(digits))
    except OSError:
        return []
