"""Which points of a sweep are composed beforehand: one of those that differ in values alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

from mcjax.app.compose import compose
from mcjax.app.sweep.launcher import Batch, multirun


def points_of(words: Sequence[str]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []

    def launch(config: object, batch: Batch) -> None:
        found.extend(batch.points)

    multirun(words, launch)
    return found


def test_hydra_finds_both() -> None:
    known = Plugins.instance().class_name_to_class
    assert {"hydra_plugins.mcjax.ProcessLauncher", "hydra_plugins.mcjax.PointsSweeper"} <= known.keys()


def test_every_combination_is_a_point_and_each_set_of_options_is_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[Sequence[str]] = []
    checked = Sweeper.validate_batch_is_legal

    def counted(self: Sweeper, batch: Sequence[Sequence[str]]) -> None:
        composed.extend(batch)
        checked(self, batch)

    monkeypatch.setattr(Sweeper, "validate_batch_is_legal", counted)
    points = points_of(["backend=sim", "sched/prefill=random,cache_aware", "seed=range(0,3)", "++workload.turns=1,2"])
    assert len(points) == len(set(points)) == 12
    assert points[0] == ("backend=sim", "sched/prefill=random", "seed=0", "++workload.turns=1")
    assert points[-1] == ("backend=sim", "sched/prefill=cache_aware", "seed=2", "++workload.turns=2")
    assert sorted(words[1] for words in composed) == ["sched/prefill=cache_aware", "sched/prefill=random"]
    assert [compose(point).seed for point in points[:4]] == [0, 0, 1, 1]
