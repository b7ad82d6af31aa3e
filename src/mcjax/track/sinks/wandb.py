"""Weights & Biases: config, live curves, summary and tables; offline unless an account's key is in the environment."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcjax.errors import ConfigError, MissingExtra
from mcjax.track.redaction import redact
from mcjax.track.sinks.base import RunInfo
from mcjax.types import NS_PER_S

MODES = ("auto", "online", "offline")
API_KEY = "WANDB_API_KEY"


class Wandb:
    """Logs a run to the project `project`. `mode="auto"` is online where WANDB_API_KEY is set, and offline elsewhere.

    Offline runs lie under `directory`; the command that uploads them is printed at the end.
    """

    def __init__(self, project: str = "mcjax", entity: str | None = None, mode: str = "auto", directory: str = "runs"):
        if mode not in MODES:
            raise ConfigError("track.sinks.Wandb.mode", mode, "unknown mode", MODES)
        self._project = project
        self._entity = entity
        self._mode = mode
        self._directory = directory
        self._run: Any = None

    @property
    def mode(self) -> str:
        if self._mode != "auto":
            return self._mode
        return "online" if os.environ.get(API_KEY) else "offline"

    def start(self, info: RunInfo) -> None:
        wandb = _wandb()
        Path(self._directory).mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            name=info.name or None,
            job_type=info.backend,
            config=redact(info.config),
            dir=self._directory,
            mode=self.mode,
            # The console belongs to the progress display, and the environment is ours to record, secrets removed.
            settings=wandb.Settings(
                console="off", silent=True, disable_code=True, disable_git=True, x_disable_meta=True
            ),
        )
        self._run.define_metric("*", step_metric="time_s")

    def log(self, time_ns: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"time_s": time_ns / NS_PER_S, **metrics})

    def finish(self, summary: Mapping[str, Any], directory: Path | None) -> None:
        self._run.summary.update(flatten(redact(summary)))
        if directory is not None:
            artifact = _wandb().Artifact(f"run-{self._run.id}", type="run")
            for path in sorted(directory.iterdir()):
                if path.suffix in {".parquet", ".json", ".yaml", ".png"}:
                    artifact.add_file(str(path), name=path.name)
            self._run.log_artifact(artifact)
        place = Path(self._run.dir).parent
        self._run.finish()
        if self.mode == "offline":
            print(f"wandb: logged offline; to upload it: wandb sync {place}")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"ttft_s": {"p50": 1}}` as `{"ttft_s/p50": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}/"))  # pyright: ignore[reportUnknownArgumentType]
        else:
            flat[prefix + key] = value
    return flat


def _wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        raise MissingExtra("wandb", "trackers") from error
