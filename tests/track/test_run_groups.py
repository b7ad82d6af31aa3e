"""Which runs repeat one another, and what tells groups apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mcjax.errors import ConfigError
from mcjax.track.groups import groups_of, label_of
from mcjax.track.metrics import CATALOGUE, HEADLINE, figures, metric
from mcjax.track.record import RunRecord, StrategySource
from mcjax.track.run import Run


def run(config: Mapping[str, Any], choices: Mapping[str, str] | None = None, **record: Any) -> Run:
    return Run(None, {}, {}, {}, record=RunRecord(config=config, choices=choices or {}, **record))


def test_seeds_and_slices_repeat() -> None:
    runs = [
        run({"alpha": alpha, "seed": seed, "slice": slice_}) for alpha in (1, 2) for seed in (3, 1) for slice_ in (0, 5)
    ]
    groups = groups_of(runs)
    assert [group.label for group in groups] == ["alpha=1", "alpha=2"]
    assert list(groups[0].runs) == [(1, 0), (1, 5), (3, 0), (3, 5)]
    assert groups[0].values == {"alpha": "1"}


def test_a_seed_that_follows_the_run_s_tells_no_group() -> None:
    runs = [run({"seed": seed, "workload.seed": seed}) for seed in (1, 2)]
    assert len(groups_of(runs)) == 1
    own = [run({"seed": seed, "workload.seed": 7 + seed}) for seed in (1, 2)]
    assert len(groups_of(own)) == 2


@pytest.mark.parametrize("key", ["track.level", "rerun", "question", "debug", "verify"])
def test_keys_that_change_nothing(key: str) -> None:
    assert len(groups_of([run({key: "a"}), run({key: "b"})])) == 1


def test_a_later_run_takes_the_place_of_its_like() -> None:
    first, second, other = (run({"alpha": 1, "seed": 0}) for _ in range(3))
    (group,) = groups_of([first, second, other])
    assert group.first is other
    assert group.repeated == 2
    assert groups_of([run({"alpha": 1}), run({"alpha": 2})])[0].repeated == 0


def test_a_choice_stands_for_its_keys() -> None:
    runs = [
        run({"sched.prefill._target_": "m.Random"}, {"sched/prefill": "random"}),
        run({"sched.prefill._target_": "m.Aware", "sched.prefill.alpha": 2.0}, {"sched/prefill": "aware"}),
        run({"sched.prefill._target_": "m.Aware", "sched.prefill.alpha": 3.0}, {"sched/prefill": "aware"}),
    ]
    groups = groups_of(runs)
    assert [group.label for group in groups] == ["prefill=random", "prefill=aware, alpha=2", "prefill=aware, alpha=3"]


def test_own_code_tells_groups_apart() -> None:
    runs = [run({"alpha": 1}, strategies={"prefill": StrategySource("mine.Pick", digest)}) for digest in ("aa", "bb")]
    groups = groups_of(runs)
    assert [group.label for group in groups] == ["prefill (own code)=mine.Pick aa", "prefill (own code)=mine.Pick bb"]


def test_labels_stay_apart() -> None:
    assert (
        label_of({"sched.prefill.alpha": "1", "sched.decode.alpha": "2"})
        == "sched.prefill.alpha=1, sched.decode.alpha=2"
    )
    assert label_of({"sched.prefill._target_": "my.Pick"}) == "sched.prefill=Pick"
    assert groups_of([run({"alpha": 1})])[0].label == "all runs"


def test_figures_are_numbers_by_flat_names() -> None:
    summary = {"ttft_s": {"p90": 1.5, "p50": None}, "seed": 3, "backend": "sim", "fine": True, "moved": {"net.a": 2}}
    assert figures(summary) == {"ttft_s.p90": 1.5, "seed": 3.0, "moved.net.a": 2.0}
    assert metric("ttft_s.p90").of(summary) == 1.5
    assert metric("ttft_s.p50").of(summary) is None
    assert metric("goodput_rps").of({}) is None
    assert set(HEADLINE) <= set(CATALOGUE)
    with pytest.raises(ConfigError, match="no such metric"):
        metric("nonsense")
