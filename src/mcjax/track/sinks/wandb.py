"""Weights & Biases: config, live curves, summary, and a run's files; offline unless an account's key is there."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcjax.errors import ConfigError, RunError
from mcjax.track.flat import flat
from mcjax.track.schemas import SCHEMAS
from mcjax.track.sinks.base import RunInfo
from mcjax.types import NS_PER_S

MODES = ("auto", "online", "offline")
API_KEY = "WANDB_API_KEY"
TEXTS = ("run.json", "config.yaml", "environment.json", "summary.json")
INIT_TIMEOUT_S, UPLOAD_TIMEOUT_S = 20.0, 40.0
"""Together no longer than a sink may take for its end, so that wandb's own work at a process's exit is bounded too."""
PICTURES = (".png", ".pdf", ".svg", ".csv")


class Wandb:
    """Logs a run to the project `project`. `mode="auto"` is online where WANDB_API_KEY is set, and offline elsewhere.

    Args:
        entity: wandb user or team; None is the account's own.
        directory: parent of wandb's folder `wandb`, where offline runs lie. The command that uploads one is printed.
        tables: which tables are uploaded. Texts, pictures and the user's own code always are.
        upload_bytes: files that would take an upload beyond this are left out, the largest first; the artifact's
            metadata names them.
    """

    def __init__(
        self,
        project: str = "mcjax",
        entity: str | None = None,
        mode: str = "auto",
        directory: str = "runs",
        tables: Sequence[str] = ("requests",),
        upload_bytes: float = 100e6,
    ):
        if mode not in MODES:
            raise ConfigError("track.sinks.Wandb.mode", mode, "unknown mode", MODES)
        for name in tables:
            if name not in SCHEMAS:
                raise ConfigError("track.sinks.Wandb.tables", name, "no such table", SCHEMAS)
        if not 0 <= upload_bytes < float("inf"):
            raise ConfigError("track.sinks.Wandb.upload_bytes", upload_bytes, "must be 0 or more bytes")
        self._project = project
        self._entity = entity
        self._mode = mode
        self._directory = directory
        self._tables = tables
        self._upload_bytes = upload_bytes
        self._run: Any = None

    @property
    def mode(self) -> str:
        if self._mode != "auto":
            return self._mode
        return "online" if os.environ.get(API_KEY) else "offline"

    def start(self, info: RunInfo) -> None:
        Path(self._directory).mkdir(parents=True, exist_ok=True)
        try:
            self._run = self._begin(info)
        except Exception as error:
            if self.mode == "offline":
                raise
            logging.getLogger("mcjax").warning(
                "wandb cannot be reached, the run is logged offline: %s", _first_line(error)
            )
            self._mode = "offline"
            self._run = self._begin(info)
        self._run.define_metric("*", step_metric="time_s")

    def _begin(self, info: RunInfo) -> Any:
        wandb = _wandb()
        return wandb.init(
            project=self._project,
            entity=self._entity,
            name=info.name or None,
            group=info.record.sweep or None,
            job_type=info.backend,
            config={**info.config, "run_key": info.record.run_key},
            dir=self._directory,
            mode=self.mode,
            reinit="create_new",  # several runs of one process stand side by side
            # The console belongs to the progress display, and the environment is ours to record, secrets removed.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=UPLOAD_TIMEOUT_S,
                finish_timeout_raises=True,
            ),
        )

    def log(self, time_ns: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"time_s": time_ns / NS_PER_S, **metrics})

    def finish(self, summary: Mapping[str, Any], directory: Path | None) -> None:
        self._run.summary.update(flat(summary))
        if directory is not None:
            self._log_files(directory)
        place = Path(self._run.dir).parent
        self._run.finish()
        if self.mode == "offline":
            print(f"wandb sync {_relative(place)}  # uploads this run")

    def _log_files(self, directory: Path) -> None:
        sizes = {path: path.stat().st_size for path in uploaded(directory, self._tables)}
        left_out: list[str] = []
        for path in sorted(sizes, key=lambda path: -sizes[path]):
            if sum(sizes.values()) <= self._upload_bytes:
                break
            left_out.append(str(path.relative_to(directory)))
            del sizes[path]
        # What is named "immutable" is uploaded from where it lies, and not copied into wandb's own folder first.
        artifact = _wandb().Artifact(f"run-{self._run.id}", type="run", metadata={"left_out": left_out})
        for path in sizes:
            artifact.add_file(str(path.resolve()), name=path.relative_to(directory).as_posix(), policy="immutable")
        self._run.log_artifact(artifact)


def uploaded(directory: Path, tables: Sequence[str]) -> Iterator[Path]:
    """What is uploaded of a run directory, as far as it is there."""
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        table = name.suffix == ".parquet" and name.stem in tables
        wanted = name.as_posix() in TEXTS or name.suffix in PICTURES or table or name.parts[0] == "strategies"
        if wanted and path.is_file() and not path.is_symlink():
            yield path


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _relative(path: Path) -> str:
    """The shortest way to write it: seen from here, if it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        raise RunError("wandb is not installed; `pip install wandb` brings it") from error
