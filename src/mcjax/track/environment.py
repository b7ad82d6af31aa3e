"""`environment.json`: what else a run depended on besides its config."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mcjax.track

PACKAGES = (
    "mcjax",
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "hydra-core",
    "omegaconf",
    "pyarrow",
    "safetensors",
    "tokenizers",
    "xxhash",
    "rich",
    "matplotlib",
    "wandb",
    "ray",
    "torch",
    "transformers",
)
"""Packages whose versions a result may depend on; only those installed are named, and none is imported."""

DIFF_BYTES = 1_000_000
GIT_TIMEOUT_S = 10.0


def describe(
    *,
    argv: Sequence[str],
    seed: int,
    devices: Sequence[str] = (),
    inputs: Mapping[str, str] | None = None,
    source: Path | None = None,
) -> dict[str, Any]:
    """Everything `environment.json` holds. `inputs` maps the path of each input file to its sha256.

    `source` is a folder of the program's own source tree (default: where mcjax lies); without git, `revision` is None.
    """
    return {
        "argv": list(argv),
        "seed": seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor_count": _processors(),
        "packages": installed(PACKAGES),
        "devices": list(devices),
        "inputs": dict(inputs or {}),
        **source_state(source or Path(mcjax.track.__file__).parent),
    }


def installed(packages: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def source_state(folder: Path) -> dict[str, Any]:
    """`revision` and `diff` of the git tree that tracks `folder`; the diff is cut at `DIFF_BYTES`, new files are named.

    A folder that merely lies inside a tree (an installed package in somebody's project) is not tracked by it.
    """
    tracked = _git(folder, "ls-files", "--", ".")
    revision = _git(folder, "rev-parse", "HEAD")
    if not tracked or revision is None:
        return {"revision": None, "diff": "", "diff_cut": False, "untracked": []}
    diff = _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-color") or ""
    untracked = _git(folder, "ls-files", "--others", "--exclude-standard", "--full-name", ":/") or ""
    encoded = diff.encode()
    return {
        "revision": revision.strip(),
        "diff": encoded[:DIFF_BYTES].decode(errors="ignore"),
        "diff_cut": len(encoded) > DIFF_BYTES,
        "untracked": untracked.splitlines()[:1000],
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, timeout=GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.decode(errors="replace")


def _processors() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
