"""Hydra finds its plugins in this namespace, and makes none from elsewhere. Every Hydra application that runs beside
mcjax imports this file, so it holds no more than it must."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class ProcessLauncher(Launcher):
    """`hydra/launcher=mcjax`: hands the task all points at once (`mcjax.app.sweep.launcher.Batch`), where Hydra's own
    launcher calls it for one after the other. They run in processes of their own."""

    def __init__(self, workers: int | None = None) -> None:
        self._workers = workers

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._config = config
        self._launch: Any = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from mcjax.app.sweep.launcher import Batch

        self._launch(self._config, Batch([tuple(words) for words in job_overrides], self._workers))
        return [JobReturn(overrides=words, status=JobStatus.COMPLETED) for words in job_overrides]
