"""One display over all points: lines that stay, and live ones on a terminal."""

from __future__ import annotations

import io

import pytest

from mcjax.app.sweep.messages import Outcome, Stage
from mcjax.app.sweep.progress import NoSweepDisplay, SweepDisplay, SweepProgress
from mcjax.track.console import Figures, Outlook
from mcjax.track.sweep import CACHED, DONE, FAILED, INTERRUPTED

FIGURES = Figures(2_000_000_000, 40, 20, 18, 2, 3000, 1000, 250)


class Clock:
    """Moves only when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def play(display: SweepDisplay, clock: Clock) -> None:
    """Four points: two side by side, of which one fails; one that was there already; one that never begins."""
    with display:
        display.add(["seed=0", "seed=1", "seed=2", "seed=3"])
        display.started(0)
        display.started(1)
        display.told(0, Outlook(virtual=True, total_requests=44))
        display.told(1, Stage("compiling", 0.25))
        clock.now = 12.0
        display.told(0, FIGURES)
        display.tick()
        display.said(1, "printed [by] a strategy")
        display.told(1, Outcome(FAILED, "it broke"))
        clock.now = 14.0
        display.started(2)
        display.told(2, Outcome(CACHED))
        display.told(0, Outcome(DONE))
        display.told(3, Outcome(INTERRUPTED, "interrupted before it began"))
        display.tick()
        clock.now = 30.0
        display.tick()


def test_without_a_terminal_a_line_for_each_point_that_ends() -> None:
    output, clock = io.StringIO(), Clock()
    play(SweepProgress(output=output, clock=clock), clock)
    assert output.getvalue().splitlines() == [
        "mcjax: 0 of 4 points ended, 2 running",
        "[point 2] printed [by] a strategy",
        "mcjax: point 2 of 4 failed after 12 s: seed=1",
        "mcjax: point 3 of 4 cached: seed=2",
        "mcjax: point 1 of 4 done after 14 s: seed=0",
        "mcjax: 4 of 4 points ended, 1 cached, 1 failed, 1 interrupted, 0 running",
    ]


def test_on_a_terminal_each_running_point_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    output, clock = io.StringIO(), Clock()
    play(SweepProgress(output=output, clock=clock), clock)
    text = output.getvalue()
    assert "point 1 of 4: seed=0: 40/44 submitted, 20 completed" in text
    assert "2 s virtual in 12 s real" in text
    assert "point 2 of 4: seed=1: compiling 25%" in text
    assert "mcjax: point 2 of 4 failed after 12 s: seed=1" in text
    assert "\x1b[1A" in text or "\x1b[2K" in text, "the live lines are drawn over"


def test_the_time_left_is_that_of_the_points_played() -> None:
    output, clock = io.StringIO(), Clock()
    with SweepProgress(output=output, clock=clock) as display:
        display.add([f"seed={seed}" for seed in range(10)])
        for point in range(4):
            display.started(point)
        display.told(0, Outcome(CACHED))
        clock.now = 10.0
        display.told(1, Outcome(DONE))
        clock.now = 21.0
        display.told(2, Outcome(DONE))
        clock.now = 40.0
        display.tick()
    assert output.getvalue().splitlines()[-1] == (
        "mcjax: 3 of 10 points ended, 1 cached, 1 running, about 2 min 20 s left"
    )


def test_hidden_shows_only_what_points_print(capsys: pytest.CaptureFixture[str]) -> None:
    play(NoSweepDisplay(), Clock())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "[point 2] printed [by] a strategy\n"
