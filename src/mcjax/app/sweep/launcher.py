"""Hydra's side of a sweep: its sweeper makes the points, and `hydra_plugins/mcjax.py` hands them over."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig


@dataclass(frozen=True, slots=True)
class Batch:
    """Points that Hydra hands over together: of each, all the words that make its config."""

    points: Sequence[tuple[str, ...]]
    workers: int | None
    """How many at a time; None for what suits the backend."""


Launch = Callable[[DictConfig, Batch], None]
"""Plays a batch. The config is that of the sweep, with nothing of what it sweeps over."""


def multirun(words: Sequence[str], launch: Launch) -> None:
    """Have Hydra make the points of a sweep, outside its command line. Its own errors pass through."""
    rest = [word for word in words if not word.startswith("-")]
    with initialize_config_module("mcjax.conf", version_base=None), sweep_folder() as folder:
        hydra = cast("Any", GlobalHydra.instance().hydra)
        hydra.multirun("config", launch, [*rest, folder], with_log_configuration=False)


@contextmanager
def sweep_folder() -> Generator[str, None, None]:
    """An override that sends the file that Hydra's sweeper insists on writing to where nobody finds it."""
    with tempfile.TemporaryDirectory(prefix="mcjax-") as folder:
        yield "hydra.sweep.dir='{}'".format(folder.replace("\\", "\\\\").replace("'", "\\'"))
