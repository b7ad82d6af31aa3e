"""`mcjax ls`: which runs it lists, in what order, what it shows of each, and how wide that is."""

from __future__ import annotations

import csv
import io
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest_app import Answer

from mcjax.app import ls
from mcjax.track import sweep
from mcjax.track.listing.entries import differing, entries
from mcjax.track.listing.shown import ago, table_of_list, text_of_list
from mcjax.track.metrics import HEADLINE
from mcjax.track.record import FILE, RunRecord, StrategySource
from mcjax.track.sweep import Point, Sweep

Ls = Callable[..., Answer]
CONFIG = {"seed": 0, "slice": 0, "workload.seed": 0, "workload.sessions": 100, "cluster": "8p8d", "track.level": "full"}


def keep(base: Path, name: str, minute: int, marker: str = "DONE", note: str = "", **changes: Any) -> Path:
    """A run directory as a list reads it."""
    directory = base / name
    directory.mkdir(parents=True)
    (directory / marker).write_text(note)
    choices = {"sched/prefill": changes.pop("prefill", "random"), "workload": "synthetic"}
    figures = dict.fromkeys(HEADLINE, 1.0) | changes.pop("figures", {})
    config = {**CONFIG, "sched.prefill._target_": f"mcjax.{choices['sched/prefill']}", **changes.pop("config", {})}
    record = RunRecord(
        run_key=changes.pop("key", f"{minute:064x}"),
        started=f"2025-11-29T15:{minute:02}:00+00:00",
        backend="sim",
        choices=choices,
        config=config,
        headline=figures if marker == "DONE" else {},
        **changes,
    )
    (directory / FILE).write_text(record.text())
    return directory


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    keep(runs, "a", 3, prefill="cache_aware", figures={"ttft_s.p90": 0.25})
    keep(runs, "b", 1, config={"seed": 4, "workload.seed": 4}, sweep="sweep-1")
    keep(runs, "c", 2, marker="FAILED", note="no luck", config={"workload.sessions": 200})
    owner = {"pid": 2**22 + 1, "host": socket.gethostname()}
    keep(runs, "d", 4, marker="RUNNING", note=json.dumps(owner), key="")
    keep(runs, "e", 5, marker="RUNNING", note=json.dumps({**owner, "pid": os.getpid()}))
    (runs / "no run").mkdir()
    return runs


@pytest.fixture
def listed(base: Path, capsys: pytest.CaptureFixture[str]) -> Ls:
    def call(*arguments: str) -> Answer:
        capsys.readouterr()
        status = ls.command(arguments)
        captured = capsys.readouterr()
        return Answer(status, captured.out, captured.err)

    return call


def names(answer: Answer) -> list[str]:
    """The runs of a list in plain text."""
    assert answer.status == 0, answer.err
    return [line.split()[1] for line in answer.out.splitlines()[1:]]


def test_the_newest_comes_last_with_state_and_what_differs(listed: Ls) -> None:
    answer = listed()
    assert names(answer) == ["b", "c", "a", "d", "e"]
    header, b, c, a, d, e = answer.out.splitlines()
    for title in ("key", "run", "when", "state", "config", "rejected", "failed", "goodput 1/s", "TTFT p90 s"):
        assert title in header
    assert b.startswith("00000000")
    assert "seed=4" in b
    assert "workload.seed" not in answer.out
    assert "failed" in c
    assert "sessions=200" in c
    assert "prefill=cache_aware" in a
    assert "cluster" not in answer.out
    assert d.startswith("-")
    assert "killed" in d
    assert "running" in e


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["sched/prefill=cache_aware"], "a"),
        (["prefill=cache*"], "a"),
        (["prefill!=cache_aware"], "bcde"),
        (["seed=4"], "b"),
        (["seed>3"], "b"),
        (["workload.sessions>=200"], "c"),
        (["sessions<200", "seed=0"], "ade"),
        (["ttft_s.p90<0.5"], "a"),
        (["ttft_s.p90<=1"], "ba"),
        (["goodput_rps=1"], "ba"),
        (["state=failed"], "c"),
        (["state!=done"], "cde"),
        (["state=killed"], "d"),
        (["sweep=sweep-1"], "b"),
        (["backend=sim"], "bcade"),
        (["backend=jax"], ""),
        (["run=a"], "a"),
        ([f"key={3:064x}"], "a"),
        (["luck"], "c"),
        (["cache_aware"], "a"),
        (["workload=synthetic", "8p8d"], "bcade"),
        (["nowhere"], ""),
    ],
    ids=lambda words: " ".join(words),
)
def test_filters(words: list[str], found: str, listed: Ls) -> None:
    answer = listed(*words)
    assert "".join(names(answer)) == found
    assert (answer.err == "no runs match\n") == (found == "")


def test_a_sweep_has_the_runs_that_it_took_again_too(listed: Ls, base: Path) -> None:
    points = [Point((), directory="a", state=sweep.CACHED), Point((), directory="b", state=sweep.DONE)]
    Sweep(base / sweep.FOLDER / "two", points=points).write()
    assert names(listed("sweep=two")) == ["b", "a"]


def test_a_figure_beyond_the_headline_is_read_from_the_summary(listed: Ls, base: Path) -> None:
    (base / "a" / "summary.json").write_text(json.dumps({"ttft_s": {"p99": 3.0}, "host": {"odd": 7}}))
    assert names(listed("ttft_s.p99>2")) == ["a"]
    assert names(listed("host.odd=7")) == ["a"]


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("prefil=random", "did you mean sched/prefill?"),
        ("ttft_s.p90<fast", "compares with a number"),
        ("nothing.like.it=3", "no config key, figure or group"),
        ("seed=4", None),
    ],
)
def test_a_filter_that_makes_no_sense_is_refused(word: str, problem: str | None, listed: Ls) -> None:
    answer = listed(word)
    assert answer.status == (2 if problem else 0)
    assert problem is None or problem in answer.err


def test_an_ambiguous_key_names_the_choices(listed: Ls, base: Path) -> None:
    keep(base, "f", 6, config={"one.alpha": 1, "two.alpha": 2})
    assert "one.alpha, two.alpha" in listed("alpha=1").err


def test_only_the_last_are_listed_unless_all_are_wanted(listed: Ls, base: Path) -> None:
    for index in range(40):
        keep(base, f"run-{index:02}", 10 + index)
    answer = listed()
    assert len(names(answer)) == 30
    assert names(answer)[-1] == "run-39"
    assert answer.err == "15 more came before these; --all or --limit N lists them\n"
    assert len(names(listed("--all"))) == 45
    assert names(listed("--limit", "2")) == ["run-38", "run-39"]
    assert names(listed("--limit", "0")) == []


def test_formats_hold_the_same_runs(listed: Ls, base: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(listed("--format", "csv").out)))
    assert [Path(row["run"]).name for row in rows] == list("bcade")
    assert [row["seed"] for row in rows] == list("40000")
    assert rows[0]["goodput_rps"] == "1.0"
    assert rows[1]["goodput_rps"] == ""
    values = json.loads(listed("--format", "json").out)
    assert [value["state"] for value in values] == ["done", "failed", "done", "killed", "running"]
    assert values[1]["note"] == "no luck"
    assert values[2]["config"]["sched/prefill"] == "cache_aware"
    assert values[2]["figures"]["ttft_s.p90"] == 0.25
    lines = listed("--format", "md").out.splitlines()
    assert len(lines) == 7
    assert {line.count("|") for line in lines} == {lines[0].count("|")}


def test_another_folder_none_and_an_empty_one(listed: Ls, base: Path) -> None:
    absent = listed("--runs", "elsewhere")
    assert absent.status == 2
    assert "elsewhere: no such folder" in absent.err
    (base.parent / "empty").mkdir()
    empty = listed("--runs", "empty")
    assert (empty.status, empty.out, empty.err) == (0, "", "no runs in empty\n")


def test_a_damaged_record_is_listed_as_such(listed: Ls, base: Path) -> None:
    (base / "a" / FILE).write_text("{")
    answer = listed("state=damaged")
    assert names(answer) == ["a"]
    assert names(listed()) == ["a", "b", "c", "d", "e"]  # nobody knows when it was


@pytest.mark.parametrize("width", [60, 80, 100, 140, 240])
def test_a_table_fits_its_terminal(width: int, base: Path) -> None:
    from rich.console import Console

    for index in range(3):
        keep(base, f"2025-11-29_15-32-1{index}", 6 + index, config={"cluster": f"{index}p{index}d" + "+1m" * 20})
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(table_of_list(entries(base), width, now_s=0))
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert all(len(line) <= width for line in text.splitlines())
    assert len(text.splitlines()) == 9
    assert "state" in text
    if width >= 100:
        assert "rejected" in text
        assert "2025-11-29_15-32-12" in text
    if width == 240:
        assert "prefix hits (tokens)" in text


def test_only_keys_that_differ_among_the_listed_are_shown(base: Path) -> None:
    found = entries(base)
    assert differing(found) == ["sched/prefill", "workload.sessions", "seed"]
    assert differing([entry for entry in found if entry.name in "de"]) == []
    assert differing([]) == []


def test_what_differs_is_what_groups_tell_apart(base: Path) -> None:
    """The quick way gives what comparing every key would."""
    from mcjax.track.groups import differing_keys

    source = StrategySource("mine.Mine", "ab" * 32, ())
    keep(base, "f", 6, prefill="custom", strategies={"prefill": source}, config={"extra": None, "flag": True})
    keep(base, "g", 7, config={"flag": 1, "workload.seed": 9})
    keep(base, "h", 8, config={"flag": True, "slice": 3, "list": [1, {"a": 2}]})
    for count in range(2, 9):
        found = entries(base)[-count:]
        slow = differing_keys([entry.record for entry in found])
        assert [key for key in differing(found) if key not in ("seed", "slice")] == slow


def test_ages() -> None:
    assert [ago(age) for age in (0.2, 5, 61, 7300, 200_000)] == ["now", "5 s", "1 min", "2 h", "2 d"]


def test_plain_text_is_aligned(base: Path) -> None:
    lines = text_of_list(entries(base), "table", now_s=0).splitlines()
    column = lines[0].index("state")
    assert {line[column:].split()[0] for line in lines[1:]} == {"done", "failed", "killed", "running"}
