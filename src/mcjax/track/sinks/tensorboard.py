"""TensorBoard: live curves, the final figures, the config and the picture of a run, as one event file."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mcjax.errors import MissingExtra, RunError
from mcjax.track.metrics import figures
from mcjax.track.sinks.base import RunInfo

NS_PER_STEP = 1_000_000
"""TensorBoard's steps are whole numbers: those of a run are milliseconds of run time."""


class TensorBoard:
    """Logs a run below `directory`, or, if that is None, in the folder `tensorboard` of its run directory.

    `tensorboard --logdir runs` then shows all runs; curves are over milliseconds of run time. Live figures are tagged
    `live/NAME`, those of the summary `summary/NAME`. tensorboardX writes the files; neither TensorBoard nor torch is
    needed for that.
    """

    def __init__(self, directory: str | None = None):
        self._directory = directory
        self._writer: Any = None
        self._last_step = 0

    def start(self, info: RunInfo) -> None:
        if self._directory is not None:
            place = Path(self._directory) / (info.name or f"seed-{info.seed}")
        elif info.directory is not None:
            place = info.directory / "tensorboard"
        else:
            raise RunError("no run directory to write into: set track.sinks.N.directory")
        self._writer = _tensorboardx().SummaryWriter(logdir=str(place))
        self._writer.add_text("config", _as_code(info.config), 0)
        self._writer.add_text("run", _as_code({"backend": info.backend, "sweep": info.record.sweep}), 0)

    def log(self, time_ns: int, metrics: Mapping[str, float]) -> None:
        self._last_step = time_ns // NS_PER_STEP
        for name, value in metrics.items():
            self._writer.add_scalar(f"live/{name}", value, self._last_step)

    def finish(self, summary: Mapping[str, Any], directory: Path | None) -> None:
        for name, value in figures(summary).items():
            self._writer.add_scalar(f"summary/{name}", value, self._last_step)
        if directory is not None and (directory / "overview.png").exists():
            self._writer.add_image("overview", _picture(directory / "overview.png"), self._last_step, dataformats="HWC")
        self._writer.close()


def _as_code(values: Mapping[str, Any]) -> str:
    """As TensorBoard's Markdown shows it unchanged."""
    import yaml

    lines = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True).splitlines()
    return "\n".join(f"    {line}" for line in lines)


def _picture(path: Path) -> Any:
    """`[height, width, 3]` uint8."""
    from matplotlib import image

    return (image.imread(path)[..., :3] * 255).round().astype(np.uint8)


def _tensorboardx() -> Any:
    try:
        return importlib.import_module("tensorboardX")
    except ModuleNotFoundError as error:
        raise MissingExtra("tensorboardX", "tensorboard") from error
