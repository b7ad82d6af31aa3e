"""A user's own strategy: named in the config, or given from Python, without a fork."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest_app import BARE, SMALL, Answer, runs

import mcjax as package
from mcjax.app.plugins import PLACES, Plugins, as_strategy, methods
from mcjax.errors import ConfigError, UserError
from mcjax.sched.base import PrefillChoice
from mcjax.sched.view import ClusterView
from mcjax.types import Request

Command = Callable[..., Answer]


def pick(request: Request, view: ClusterView, rng: np.random.Generator) -> PrefillChoice:
    """A plain function."""
    return PrefillChoice(1)


class Pick:
    def choose(self, request: Request, view: ClusterView, rng: np.random.Generator) -> PrefillChoice:
        return PrefillChoice(1)


def test_module_in_the_working_directory(fresh: Command, place: Path) -> None:
    custom = ["sched/prefill=custom", "sched.prefill._target_=my_policy.Mine"]
    answer = fresh(*SMALL, *custom, "+sched.prefill.alpha=2")
    assert answer.status == 0, answer.err
    assert runs(place)[0].name in answer.out.splitlines()[-1], "the run directory comes last"
    assert set(package.load(runs(place)[0]).decisions.column("strategy").to_pylist()) >= {"Mine"}


def test_keys_of_a_custom_strategy_need_no_plus(mcjax: Command, place: Path) -> None:
    custom = ["sched/prefill=custom", "sched.prefill._target_=my_policy.Mine", "sched.prefill.alpha=3"]
    assert mcjax(*SMALL, *custom).status == 0
    assert package.load(runs(place)[0]).config["sched"]["prefill"]["alpha"] == 3


@pytest.mark.parametrize("given", [pick, Pick(), Pick], ids=["function", "object", "class"])
def test_from_python(place: Path, given: Any) -> None:
    run = package.run(BARE, prefill=given)
    assert run.directory is None
    assert not runs(place)
    assert set(run.requests.column("prefill_instance").to_pylist()) == {"p1"}
    decisions = run.decisions.filter(
        np.array([stage == "prefill" for stage in run.decisions.column("stage").to_pylist()])
    )
    assert set(decisions.column("strategy").to_pylist()) == {getattr(given, "__name__", "Pick")}


def test_inside_a_running_loop(place: Path) -> None:
    async def main() -> package.Run:
        return package.run(BARE, prefill=pick)

    assert asyncio.run(main()).summary["digest"] == package.run(BARE, prefill=pick).summary["digest"]


def test_every_node_has_its_own_copy() -> None:
    from mcjax.app.build import policies_of
    from mcjax.app.compose import compose
    from mcjax.kvpool.eviction.lru import LRU

    given = LRU()
    policies = policies_of(compose(BARE), Plugins({"eviction": given}))
    made = [policies.eviction(), policies.eviction(), given]
    assert all(isinstance(one, LRU) for one in made)
    assert len({id(one) for one in made}) == 3
    assert policies.watermark() is not policies.watermark()


@pytest.mark.parametrize("place_name", [name for name, (_, kept) in PLACES.items() if len(methods(kept)) == 1])
def test_one_method_may_be_a_function(place_name: str) -> None:
    protocol = PLACES[place_name][1]
    (method,) = methods(protocol)
    made = as_strategy(method, pick)
    assert type(made).__name__ == "pick"
    assert callable(getattr(made, method))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefil": pick}, "no such strategy, did you mean prefill"),
        ({"prefill": lambda request: None}, r"must take choose\(request, view, rng\)"),
        ({"prefill": object()}, "lacks the method choose"),
        ({"tenancy": pick}, "lacks the method classify, next, charge"),
        ({"eviction": Pick()}, "lacks the method on_insert, on_hit, on_remove, victims"),
        ({"prefill": 3}, "lacks the method choose"),
    ],
)
def test_what_does_not_fit(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plugins(given)


def test_class_that_needs_arguments() -> None:
    class Needs(Pick):
        def __init__(self, what: int):
            self.what = what

    with pytest.raises(ConfigError, match="prefill=Needs: cannot be made without arguments"):
        Plugins({"prefill": Needs})


def test_mistake_from_python_shows_no_internals(place: Path) -> None:
    with pytest.raises(UserError) as caught:
        package.run([*SMALL, "cluster=7x"])
    assert [frame.name for frame in caught.traceback] == ["test_mistake_from_python_shows_no_internals", "run"]


def test_own_error_from_python_is_itself(place: Path) -> None:
    def broken(request: Request, view: ClusterView, rng: np.random.Generator) -> PrefillChoice:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        package.run(SMALL, prefill=broken)
    run = package.load(runs(place)[0])
    assert (run.state, run.reason) == ("failed", "ZeroDivisionError: mine")
