"""`mcjax.sweep`: lists of strategies, classes of a notebook, running loops, interrupts."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest_app import BARE, SMALL, Answer, runs

import mcjax as package
from mcjax.app.sweep.api import sweep
from mcjax.app.sweep.given import combinations, unpacked
from mcjax.errors import ConfigError
from mcjax.sched.base import PrefillChoice
from mcjax.sched.view import ClusterView
from mcjax.track.run import load
from mcjax.types import Request


class Weighs:
    """Takes the shortest queue, or the one of a number."""

    def __init__(self, always: int = -1):
        self.always = always
        self.calls = 0

    def choose(self, request: Request, view: ClusterView, rng: np.random.Generator) -> PrefillChoice:
        self.calls += 1
        return PrefillChoice(int(view.queue_s.argmin()) if self.always < 0 else self.always)


class PressesKeys(Weighs):
    """Presses Ctrl-C in the process that the sweep was started from."""

    def choose(self, request: Request, view: ClusterView, rng: np.random.Generator) -> PrefillChoice:
        if self.calls == 3:
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(60)
        return super().choose(request, view, rng)


def first(request: Request, view: ClusterView, rng: np.random.Generator) -> PrefillChoice:
    return PrefillChoice(0)


def digests(found: package.Runs) -> list[str]:
    return [run.summary["digest"] for run in found]


@pytest.mark.check_long
def test_lists_are_swept_over_in_order(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = Weighs()
    found = sweep([*BARE, "+seeds=2"], workers=2, prefill=[mine, first])
    alone = [package.run([*BARE, f"seed={seed}"], prefill=one) for seed in (0, 1) for one in (Weighs(), first)]
    assert digests(found) == [run.summary["digest"] for run in alone]
    assert len(set(digests(found))) == 4
    assert [run.summary["seed"] for run in found] == [0, 0, 1, 1]
    assert found[0].requests.num_rows == alone[0].requests.num_rows, "the tables come too where no disk holds them"
    assert mine.calls == 0, "each point has a copy of its own"
    assert not found.refused
    assert capsys.readouterr().out == ""


NOTEBOOK = """
import asyncio, linecache, os, sys, tempfile

CELL = '''
from dataclasses import dataclass
from mcjax.sched.base import PrefillChoice

OFFSET = 1

def moved(index, view):
    return (index + OFFSET) % len(view.queue_s)

@dataclass
class Mine:
    index: int = 0
    def choose(self, request, view, rng):
        return PrefillChoice(moved(self.index, view))

def of_a_cell(index):
    def always(request, view, rng):
        return PrefillChoice(index)
    return always
'''
name = os.path.join(tempfile.gettempdir(), "ipykernel_1", "2.py")
linecache.cache[name] = (len(CELL), None, CELL.splitlines(True), name)
exec(compile(CELL, name, "exec"), globals())

async def cell():
    import mcjax
    alone = mcjax.run(sys.argv[1:], prefill=Mine(1))
    return alone, mcjax.sweep(sys.argv[1:], prefill=[Mine(0), Mine(1), of_a_cell(1), of_a_cell(0)])

alone, runs = asyncio.run(cell())
assert not runs.refused, runs.refused
one, other, one_too, other_too = [run.requests for run in runs]
assert one.equals(one_too) and not one.equals(other) and other.equals(other_too)
print([run.config["plugins"]["prefill"] for run in runs])
print([run.cached for run in runs], alone.record.run_key == runs[1].record.run_key != "")
print([len(list(run.directory.glob("strategies/*.py"))) for run in runs])
"""


@pytest.mark.check_long
def test_classes_of_a_notebook_inside_its_running_loop(fresh: Callable[..., Answer], place: Path) -> None:
    """Neither a file that could be imported, nor a guard around the call; source is kept, and what ran is known."""
    answer = fresh(*SMALL, code=NOTEBOOK)
    assert answer.status == 0, answer.err
    assert answer.out.splitlines() == [
        "['Mine', 'Mine', 'always', 'always']",
        "[False, True, False, False] True",
        "[1, 1, 1, 1]",
    ]


@pytest.mark.check_long
@pytest.mark.parametrize("inside_a_loop", [False, True])
def test_an_interrupt_keeps_what_there_is(place: Path, capsys: pytest.CaptureFixture[str], inside_a_loop: bool) -> None:
    async def cell() -> package.Runs:
        return sweep(SMALL, workers=1, prefill=[Weighs(), PressesKeys(), first])

    found = asyncio.run(cell())  # whose own answer to Ctrl-C would reach nobody who waits
    assert len(found) == 1
    assert [reason for _, reason in found.refused] == ["interrupted", "interrupted before it began"]
    partial = load(place / "runs" / found.refused[0][0])
    assert (partial.state, partial.decisions.num_rows >= 2) == ("failed", True)
    assert len(runs(place)) == 2
    assert "interrupted; of the sweep's 3 points are missing: 2" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_failures_are_refused_by_name_and_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(request: Request, view: ClusterView, rng: np.random.Generator) -> PrefillChoice:
        return PrefillChoice(1 // 0)

    found = sweep(BARE, workers=1, prefill=[fails, first])
    assert len(found) == 1
    ((name, reason),) = found.refused
    assert name == "prefill=fails"
    assert "1 // 0" in reason
    told = "mcjax: 1 of the sweep's 2 points failed:\n  prefill=fails: an error in your own code"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("strategies", "message"),
    [
        ({"prefill": []}, "prefill=\\[\\]: there is nothing to sweep over"),
        ({"prefil": [first]}, "did you mean prefill"),
        ({"prefill": [first, 3]}, "prefill=int: lacks the method choose"),
        ({"prefill": [first], "decode": 3}, "decode=int: lacks the method"),
    ],
)
def test_mistakes_are_told_before_anything_runs(place: Path, strategies: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep(BARE, **strategies)
    assert not runs(place)


def test_what_cannot_be_sent_is_named() -> None:
    stuck = Weighs()
    stuck.always = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="prefill=Weighs: cannot be sent to another process, as a sweep does"):
        combinations({"prefill": stuck})


def test_combinations_are_named_apart() -> None:
    found = combinations({"prefill": [Weighs(1), Weighs(2), first]})
    assert [one.words for one in found] == [("prefill=Weighs#1",), ("prefill=Weighs#2",), ("prefill=first",)]
    assert unpacked(found[1].pickled).get("prefill").always == 2
