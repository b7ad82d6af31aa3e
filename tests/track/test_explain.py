"""A request's story: every event and decision of it, in words that say what was chosen among what, and a picture."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import numpy as np
import pytest
from track_fixtures import ARGUMENTS, MS, fabricate, key_of, row

from mcjax.errors import RunError
from mcjax.track.explain import MOST_CANDIDATES, plain, sections
from mcjax.track.recorder import TableRecorder
from mcjax.track.run import Run
from mcjax.track.summary import summarise
from mcjax.types import Decision, RequestState


def run_of(recorder: TableRecorder, level: str = "full") -> Run:
    tables = recorder.tables()
    return Run(None, summarise(tables, **ARGUMENTS), {"track": {"level": level}}, tables)


def placed(**changes: Any) -> Decision:
    """Instance b is chosen: it waits 2 s, and computes in 3 s from its own prefix."""
    vectors = {"queue_s": [1.0, 2.0, 4.0], "transfer_s": [0.0, 0.0, 0.0], "prefill_s": [9.0, 3.0, 3.0]}
    values: dict[str, Any] = {
        "time_ns": 10 * MS,
        "request_id": 7,
        "stage": "prefill",
        "strategy": "Mine",
        "choice": "b",
        "expected_s": 5.0,
        "names": ["a", "b", "c"],
        "candidates": {name: np.array(vector) for name, vector in vectors.items()},
        "outcome_s": 4.0,
        "outcome": "completed",
    }
    return Decision(**{**values, **changes})


def story_of(*decisions: Decision, state: RequestState = RequestState.COMPLETED, **fields: Any) -> Any:
    """Request 7: arrives at 10 ms, has a transfer and a chunk, two tokens, and these decisions."""
    recorder = TableRecorder(key_of)
    recorder.event(10 * MS, "submit", 7, "frontend", tokens=100, blocks=2)
    recorder.event(11 * MS, "submit", 8, "frontend")
    recorder.event(30 * MS, "prefill_step", 7, "b", start_ns=20 * MS, tokens=100)
    recorder.event(
        19 * MS, "transfer", 7, "n0>n1", tier="dram>dram", first_block=5, blocks=2, nbytes=4096, start_ns=12 * MS
    )
    recorder.event(40 * MS, state.value, 7, "frontend")
    for decision in decisions:
        recorder.decision(decision)
    arrived = {"prefill_instance": "b", "decode_instance": "d", "attempts": 1, "prefill_start_ns": 11 * MS}
    ends = [30 * MS, 40 * MS] if state is RequestState.COMPLETED else []
    recorder.request(row(7, 10 * MS, ends, state, **{**arrived, **fields}))
    return run_of(recorder).request(7)


def test_every_event_in_order_with_time_since_arrival() -> None:
    story = story_of()
    seen = [(event.kind, event.begin_s, event.took_s) for event in story.events]
    assert seen == [
        ("submit", 0.0, None),
        ("transfer", 0.002, 0.007),
        ("prefill_step", 0.01, 0.01),
        ("completed", 0.03, None),
    ]
    moved = story.events[1]
    assert (moved.place, moved.tier, moved.blocks, moved.nbytes) == ("n0>n1", "dram>dram", 2, 4096)
    assert moved.first_block == key_of(5).hex()
    assert [event.kind for event in story.timeline()] == [
        "submit", "transfer", "prefill_step", "(decoding)", "completed",
    ]  # fmt: skip


def test_candidates_add_up_and_the_choice_is_marked() -> None:
    (decision,) = story_of(placed()).decisions
    assert [candidate.total_s for candidate in decision.candidates] == [10.0, 5.0, 7.0]
    assert [candidate.chosen for candidate in decision.candidates] == [False, True, False]
    section = sections(story_of(placed()))[1]
    assert [line[1] for line in section.rows] == ["b", "c", "a"]  # best first
    assert section.rows[section.marked] == ["*", "b", "2 s", "0 s", "3 s", "5 s"]
    assert "expected 5 s to the first token, was 4 s (estimate 25.0% too high)" in section.lines


def test_a_pull_is_in_the_total_of_the_chosen_one_only() -> None:
    vectors = {"queue_s": [1.0, 2.0, 4.0], "transfer_s": [0.0, 0.5, 0.5], "prefill_s": [3.0, 9.0, 9.0]}
    pulled = placed(
        source="a", expected_s=3.25, candidates={name: np.array(vector) for name, vector in vectors.items()}
    )
    (decision,) = story_of(pulled).decisions
    a, b, c = decision.candidates
    assert (b.compute_s, b.total_s) == (0.75, 3.25)  # from the pulled prefix
    assert (a.total_s, c.total_s) == (4.0, 13.0)  # from their own
    assert "prefix pulled from a" in plain(story_of(pulled))


def test_a_rejection_says_what_was_promised() -> None:
    refused = Decision(10 * MS, 7, "admission.arrival", "Early", "reject", expected_s=8.0, reason="ttft")
    text = plain(story_of(refused, state=RequestState.REJECTED, reason="ttft at arrival", slo_ttft_s=2.5))
    assert "request 7: rejected, ttft at arrival" in text
    assert "expected 8 s, promised 2.5 s" in text


def test_retries_and_what_is_not_known() -> None:
    first = placed(outcome="BlockCorrupt", outcome_s=float("nan"), expected_s=float("nan"))
    text = plain(story_of(first, placed(time_ns=12 * MS), attempts=2))
    assert "after 1 failed attempt" in text
    assert text.index("outcome: BlockCorrupt") < text.index("outcome: completed")
    assert " nan" not in text


def test_recomputing_is_a_candidate_too() -> None:
    fetch = Decision(
        11 * MS,
        7,
        "fetch",
        "Cheapest",
        "recompute",
        expected_s=0.25,
        names=["n3"],
        candidates={"transfer_s": np.array([0.5])},
    )
    section = sections(story_of(fetch))[1]
    assert [line[:2] for line in section.rows] == [["*", "recompute"], ["", "n3"]]


def test_quantities_without_a_column_are_shown() -> None:
    decode = Decision(
        11 * MS,
        7,
        "decode",
        "LeastLoaded",
        "d1",
        names=["d0", "d1"],
        candidates={"step_s": np.array([0.002, 0.001]), "free": np.array([3.0, np.inf])},
    )
    section = sections(story_of(decode))[1]
    assert section.header == ["", "candidate", "free", "step"]
    assert section.rows[section.marked] == ["*", "d1", "inf", "1 ms"]


def test_a_thousand_candidates_are_cut_but_never_the_chosen() -> None:
    count = 1000
    vectors = {"queue_s": np.arange(count, dtype=np.float64)}
    decision = placed(names=[f"p{index}" for index in range(count)], candidates=vectors, choice="p900")
    section = sections(story_of(decision))[1]
    assert len(section.rows) == MOST_CANDIDATES + 1
    assert section.rows[section.marked][1] == "p900"
    assert f"{count - MOST_CANDIDATES - 1} more candidates" in section.notes[0]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_rich_shows_whole_cells_at_any_width(width: int) -> None:
    from rich.console import Console

    console = Console(file=StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(story_of(placed()))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in shown.splitlines())
    assert "prefill_step" in shown
    assert "…" not in shown
    assert (key_of(5).hex() in shown) is (width == 200)


def test_plain_text_keeps_everything_on_one_line() -> None:
    text = plain(story_of(placed()))
    (line,) = [line for line in text.splitlines() if " transfer " in line and "n0>n1" in line]
    assert line.split() == ["+0.002000", "s", "7", "ms", "transfer", "n0>n1", "dram>dram", "2", "00000005", "4", "KiB"]
    assert str(story_of(placed())) == text
    assert "&gt;" in story_of(placed())._repr_html_()


def test_an_unknown_request_is_told_its_neighbours() -> None:
    run = run_of(fabricate())
    with pytest.raises(RunError, match=r"no request 99; the nearest are 2, 3, 4, 5$"):
        run.request(99)
    with pytest.raises(RunError, match="the run has none at all"):
        run_of(TableRecorder(key_of)).request(0)


def test_a_run_of_a_lower_level_says_how_to_get_it() -> None:
    with pytest.raises(RunError, match=r"track\.level=requests.*again with track\.level=full"):
        run_of(fabricate(), "requests").request(2)


def test_an_unfinished_request_has_a_story() -> None:
    recorder = TableRecorder(key_of)
    recorder.event(5 * MS, "submit", 3, "frontend")
    recorder.event(9 * MS, "preempt", 3, "d0")
    recorder.decision(placed(request_id=3))
    story = run_of(recorder).request(3)
    assert repr(story) == "RequestStory(3, unfinished, 2 events, 1 decisions)"
    assert "not ended when the run did" in str(story)
    assert story.events[1].begin_s == pytest.approx(0.004)
    assert len(story.plot().axes) == 1


def test_the_picture_has_a_row_a_place() -> None:
    figure = story_of(placed()).plot()
    (panel,) = figure.axes
    assert [label.get_text() for label in panel.get_yticklabels()] == ["phases", "frontend", "n0>n1", "b", "d"]
    bars = {(round(bar.get_x()), round(bar.get_width())) for bar in panel.patches}
    assert {(0, 10), (10, 10), (20, 10), (2, 7)} <= bars  # milliseconds: waiting, prefill, decode, the transfer


def test_rows_of_real_runs_survive_json() -> None:
    """Infinity in `others` is what an unbounded estimate looks like in the log."""
    recorder = fabricate()
    entry = recorder.tables()["decisions"].to_pylist()[0]
    assert json.loads(entry["others"]) == {"waits": [1.0, float("inf")]}
    (first, _) = run_of(recorder).request(2).decisions
    assert first.candidates[1].others == {"waits": float("inf")}
