"""`+seeds` and `+slices`: what they stand for, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest_app import Answer, runs
from hypothesis import given
from hypothesis import strategies as st

import mcjax as package
from mcjax.app.compose import compose
from mcjax.app.sweep.expand import expanded
from mcjax.errors import ConfigError

PLAIN = st.lists(st.sampled_from(["backend=sim", "cluster=4p4d,8p8d", "workload.sessions=6", "~cost"]), unique=True)


@given(PLAIN, st.integers(1, 1000), st.integers(0, 10**6))
def test_seeds_count_on_from_the_one_given(words: list[str], count: int, first: int) -> None:
    found = expanded([*words, f"seed={first}", f"+seeds={count}"])
    assert found == ["-m", *words, f"seed=range({first},{first + count})"]
    assert expanded([f"+seeds={count}", *words, f"seed={first}"]) == found
    assert expanded([*words, f"+seeds={count}"]) == ["-m", *words, f"seed=range(0,{count})"]


@given(PLAIN, st.integers(1, 1000), st.integers(1, 1000))
def test_slices_are_all_played_and_multiply_with_seeds(words: list[str], slices: int, seeds: int) -> None:
    found = expanded(["-m", f"+slices={slices}", *words, f"+seeds={seeds}"])
    assert found == ["-m", *words, f"seed=range(0,{seeds})", f"slices={slices}", f"slice=range(0,{slices})"]


@given(PLAIN)
def test_other_words_are_left_alone(words: list[str]) -> None:
    assert expanded([*words, "slices=8", "slice=3"]) == [*words, "slices=8", "slice=3"]


def test_printing_a_config_does_not_become_a_sweep() -> None:
    assert expanded(["--cfg", "job", "+seeds=3"])[0] == "--cfg"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["+seeds=0"], "seeds=0: must be a whole number, 1 or more"),
        (["+seeds=ten"], "seeds=ten: must be a whole number"),
        (["+seeds="], "seeds=: must be a whole number"),
        (["+slices=-1"], "slices=-1: must be a whole number"),
        (["+slices=1.5"], "slices=1.5: must be a whole number"),
        (["+seeds=3", "seed=1,2"], r"seeds=with seed=1,2: \+seeds counts on from one seed"),
        (["+slices=3", "slice=1"], r"slices=3: \+slices sets slices and plays every slice; leave out slice="),
        (["+slices=3", "slices=4"], "leave out slices="),
    ],
)
def test_mistakes_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expanded(words)


@pytest.mark.parametrize("word", ["+seeds=3", "+slices=3"])
def test_where_one_run_is_asked_for_they_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="here is place for one"):
        compose([word])


@pytest.mark.parametrize(
    ("words", "message"), [(["+seeds=0"], "seeds=0: must be"), (["slices=2", "slice=2"], "slice=2")]
)
def test_mistakes_on_the_command_line(
    mcjax: Callable[..., Answer], place: Path, words: list[str], message: str
) -> None:
    answer = mcjax("backend=sim", *words)
    assert answer.status == 2
    assert message in answer.err
    assert not runs(place)


def test_a_slice_in_which_nothing_starts_is_named(place: Path, trace: Path) -> None:
    with pytest.raises(ConfigError, match="slice=1: no session starts in this one of slices=200; take fewer slices"):
        package.run(["experiment=mooncake_8p8d", f"workload.path={trace}", "slices=200", "slice=1"])
