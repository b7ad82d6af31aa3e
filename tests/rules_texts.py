"""Finds what no published file may contain: paths of the machine it was written on, and hosts of package registries."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

# Put together from pieces, so that this file passes its own check.
FOLDERS = ("wo" + "rk", "ro" + "ot", "tm" + "p", "opt/wh" + "eels", "opt/py" + "pi", "etc/x" + "dg")
HOSTS = (
    "py" + "pi.org",
    "pythonho" + "sted.org",
    "npm" + "js.org",
    "npmmi" + "rror.com",
    "deb.deb" + "ian.org",
    "ana" + "conda.org",
    "proxy.gol" + "ang.org",
    "crat" + "es.io",
)
# An absolute path: nothing that could be a folder stands before its first slash.
PATH = re.compile(r"(?<![\w.\-)}\]])/(?:" + "|".join(map(re.escape, FOLDERS)) + r")(?![\w.-])")
HOST = re.compile("|".join(map(re.escape, HOSTS)))


def private_words(text: str) -> Iterator[tuple[int, str]]:
    """`(line, word)` of each path of a machine or registry host in `text`."""
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern in (PATH, HOST):
            yield from ((number, match.group()) for match in pattern.finditer(line))


def published_files(root: Path) -> list[Path]:
    """Files that git tracks or would add; without git, every file outside hidden and build folders."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        skipped = {"build", "dist", "runs", "wandb", "__pycache__"}
        found = (path for path in root.rglob("*") if path.is_file())
        return sorted(
            p for p in found if not any(part in skipped or part[0] == "." for part in p.relative_to(root).parts)
        )
    return sorted(path for name in listed.split("\0") if name and (path := root / name).is_file())


def text_of(path: Path) -> str | None:
    """The file's text, or None for a binary file."""
    data = path.read_bytes()
    if b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
