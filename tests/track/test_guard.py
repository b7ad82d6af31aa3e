"""A tracker that raises, hangs, is slow or absent hurts nobody, whichever of its calls it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sink_fixtures import CALLS, INFO, Listing

from mcjax.errors import MissingExtra
from mcjax.track.sinks.base import Sink
from mcjax.track.sinks.guard import Guarded

Hanging = Callable[[str], Listing]


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    """Makes sinks that hang in a call until the test is over."""
    made: list[Listing] = []

    def make(call: str) -> Listing:
        made.append(Listing(hangs=call))
        return made[-1]

    yield make
    for sink in made:
        sink.release.set()


def play(guarded: Guarded, points: int = 5) -> None:
    guarded.start(INFO)
    for tick in range(points):
        guarded.log(tick, {"x": 1.0})
    guarded.finish({"a": 1}, None)


def test_a_healthy_sink_gets_every_call_in_order() -> None:
    sink, warnings = Listing(), list[str]()
    guarded: Sink = Guarded(sink, warn=warnings.append)
    assert isinstance(guarded, Guarded)
    play(guarded)
    assert sink.calls == ["start", *["log"] * 5, "finish"]
    assert sink.told[3] == (2, {"x": 1.0})
    assert not warnings


@pytest.mark.parametrize(
    "error", [ValueError("no luck"), SystemExit(3), KeyboardInterrupt(), MissingExtra("tracker", "it"), MemoryError()]
)
@pytest.mark.parametrize("fails", CALLS)
def test_a_sink_that_raises_is_left_alone_after_one_warning(fails: str, error: BaseException) -> None:
    sink, warnings = Listing(fails=fails, error=error), list[str]()
    play(Guarded(sink, warn=warnings.append))
    assert sink.calls.count(fails) == 1
    assert sink.calls[-1] == fails
    assert len(warnings) == 1
    assert warnings[0].startswith(f"tracker Listing failed in {fails} and is left alone from here: ")
    assert type(error).__name__ in warnings[0]
    assert str(error) in warnings[0]


@pytest.mark.parametrize("hangs", CALLS)
def test_a_sink_that_hangs_delays_nothing_but_a_bounded_end(hanging: Hanging, hangs: str) -> None:
    sink, warnings = hanging(hangs), list[str]()
    play(Guarded(sink, timeout_s=0.05, warn=warnings.append), points=1000)
    assert sink.calls[-1] == hangs
    expected = "tracker Listing did not finish within 0.05 s; its log is incomplete; the run itself is not affected"
    assert warnings == [expected]


def test_a_sink_that_was_given_up_is_told_nothing_more(hanging: Hanging) -> None:
    sink = hanging("log")
    guarded = Guarded(sink, timeout_s=0.05, warn=lambda problem: None)
    play(guarded)
    sink.release.set()
    guarded.wait(float("inf"))
    assert sink.calls == ["start", "log"]


def test_points_dropped_by_a_slow_sink_are_counted(hanging: Hanging) -> None:
    sink, warnings = hanging("log"), list[str]()
    guarded = Guarded(sink, queued_points=2, warn=warnings.append)
    guarded.start(INFO)
    guarded.log(0, {})
    assert sink.entered.wait(10)
    for tick in range(5):
        guarded.log(tick, {})
    sink.release.set()
    guarded.finish({}, None)
    assert sink.calls == ["start", "log", "log", "log", "finish"]
    assert warnings == ["tracker Listing was too slow: 3 live points were dropped; the run itself is not affected"]


def test_the_summary_goes_before_points_that_still_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits when the time for it is over is dropped, so that `finish` is still called."""
    monkeypatch.setattr("mcjax.track.sinks.guard.POINTS_SHARE", 0.0)
    sink, warnings = Listing(hangs="log"), list[str]()
    guarded = Guarded(sink, warn=warnings.append)
    guarded.start(INFO)
    for tick in range(100):
        guarded.log(tick, {})
    assert sink.entered.wait(10)
    guarded.close({}, None)
    sink.release.set()
    guarded.wait(float("inf"))
    assert sink.calls == ["start", "log", "finish"]
    assert guarded.dropped == 99
    assert "99 live points were dropped" in warnings[0]


def test_a_chatty_run_costs_no_memory(hanging: Hanging) -> None:
    sink = hanging("start")
    guarded = Guarded(sink, queued_points=4, timeout_s=0.05, warn=lambda problem: None)
    guarded.start(INFO)
    for tick in range(10_000):
        guarded.log(tick, {"x": 1.0})
    assert guarded.dropped >= 9_996
    guarded.finish({}, None)


def test_what_a_sink_is_handed_is_its_own() -> None:
    class Writes(Listing):
        def _called(self, name: str, *arguments: object) -> None:
            if name == "start":
                arguments[0].config["seed"] = 0  # type: ignore[attr-defined]
            else:
                arguments[name == "log"].clear()  # type: ignore[attr-defined]

    summary, metrics = {"ttft_s": {"p50": 1.0}}, {"x": 1.0}
    warnings: list[str] = []
    guarded = Guarded(Writes(), warn=warnings.append)
    guarded.start(INFO)
    guarded.log(1, metrics)
    guarded.finish(summary, None)
    assert not warnings
    assert (INFO.config, summary, metrics) == ({"seed": 7}, {"ttft_s": {"p50": 1.0}}, {"x": 1.0})
