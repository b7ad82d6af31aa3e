"""Hydra finds its plugins in this namespace, and makes none from elsewhere. Every Hydra application that runs beside
mcjax imports this file, so it holds no more than it must."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
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


class PointsSweeper(BasicSweeper):
    """`hydra/sweeper=mcjax`: Hydra's own, but for the time that it takes to see that all points can be composed.

    That depends on the options that a point takes, and on the names of its keys, not on their values: of points that
    differ in values alone one is enough. Each takes a tenth of a second.
    """

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        assert self.hydra_context is not None
        loader = self.hydra_context.config_loader
        keys = {_key(word) for words in batch for word in words}
        groups = {key for key in keys if loader.get_group_options(key)}
        kinds = {tuple(_kind(words, groups)): words for words in batch}
        super().validate_batch_is_legal(list(kinds.values()))


def _kind(words: Sequence[str], groups: Iterable[str]) -> list[str]:
    """What composing depends on: options as they are, other words without their values."""
    return [word if _key(word) in groups or "=" not in word else word.partition("=")[0] for word in words]


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0].partition("@")[0]
