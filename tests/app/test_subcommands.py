"""`mcjax explain`, `mcjax workload` and the other sub-commands: what they print, and how they refuse."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest_app import SIM, SMALL, Answer, runs

import mcjax as package
from mcjax import cli
from mcjax.app import explain, workload_report
from mcjax.errors import ConfigError

Fresh = Callable[..., Answer]


@pytest.fixture
def kept(place: Path) -> Path:
    """The directory of a small simulated run."""
    package.run(SMALL)
    return runs(place)[0]


def call(command: Callable[..., int], capsys: pytest.CaptureFixture[str], *arguments: str) -> Answer:
    capsys.readouterr()
    status = command(list(arguments))
    captured = capsys.readouterr()
    return Answer(status, captured.out, captured.err)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_is_there_and_in_the_help(name: str) -> None:
    command = importlib.import_module(cli.COMMANDS[name]).command
    assert list(inspect.signature(command).parameters) == ["arguments"]
    assert f"  mcjax {name} " in cli.HELP
    with pytest.raises(SystemExit) as ended:
        command(["--help"])
    assert ended.value.code == 0


def test_explain_shows_every_event_and_decision(kept: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = package.load(kept)
    story = run.request(run.requests.column("request_id")[3].as_py())
    answer = call(explain.command, capsys, str(kept), str(story.request_id), "--plot", "way.png")
    assert answer.status == 0, answer.err
    assert answer.out == f"{story}\n"
    mine = [entry for entry in run.events.to_pylist() if entry["request_id"] == story.request_id]
    assert len(mine) == len(story.events) > 4
    for decision in story.decisions:
        assert f"{decision.strategy} chose {decision.choice}" in answer.out
    placed = next(decision for decision in story.decisions if decision.stage == "prefill")
    assert {candidate.name for candidate in placed.candidates} == {"p0", "p1"}
    (best,) = [candidate for candidate in placed.candidates if candidate.chosen]
    assert best.total_s == pytest.approx(placed.expected_s)
    assert (place / "way.png").read_bytes().startswith(b"\x89PNG")


def test_explain_refuses_in_words(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = call(explain.command, capsys, str(kept), "123456789")
    assert (unknown.status, unknown.out) == (2, "")
    assert "no request 123456789; the nearest are" in unknown.err
    absent = call(explain.command, capsys, "runs/none", "0")
    assert (absent.status, absent.err) == (2, "mcjax: runs/none: no such directory\n")
    first = package.load(kept).requests.column("request_id")[0].as_py()
    unwritable = call(explain.command, capsys, str(kept), str(first), "--plot", "way.nonsense")
    assert unwritable.status == 2
    assert "--plot=way.nonsense: cannot be written" in unwritable.err


def test_explain_of_a_lean_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package.run([*SMALL, "track.level=lean"])
    answer = call(explain.command, capsys, str(runs(place)[0]), "0")
    assert answer.status == 2
    assert "track.level=full" in answer.err


def test_explain_through_the_command_line(kept: Path, fresh: Fresh) -> None:
    first = package.load(kept).requests.column("request_id")[0].as_py()
    answer = fresh("explain", str(kept), str(first))
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.startswith(f"request {first}: completed\n")


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "mooncake"),
        ('{"chat_id": 1, "timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "bailian"),
        ('{"session_id": "s", "timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "aiperf"),
        ('{"id": "c", "block_size": 64, "requests": []}', "weka"),
        ('\n\n{"arrival_s": 0, "input_tokens": 5, "output_tokens": 1}', "jsonl"),
        ("\ufeffTIMESTAMP,ContextTokens,GeneratedTokens", "azure"),
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", "burstgpt"),
    ],
)
def test_a_trace_is_known_by_its_first_line(line: str, option: str, tmp_path: Path) -> None:
    path = tmp_path / "it's a trace.txt"
    path.write_text(line + "\n")
    assert workload_report.format_of(path) == option
    config = workload_report.compose(workload_report.choice(str(path)))
    assert config.workload.path == str(path)


@pytest.mark.parametrize("text", ["", "a,b,c\n", '{"time": 1}\n', "{broken\n", "[1]\n"])
def test_an_unknown_format_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no known format"):
        workload_report.choice(str(path))


def test_workload_by_path_and_by_name(trace: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = [word for word in SIM if word.startswith(("hardware", "model"))]
    answer = call(workload_report.command, capsys, str(trace), *machine, "workload.limit=10")
    assert answer.status == 0, answer.err
    lines = dict(line.split("  ", 1) for line in answer.out.splitlines()[:-1])
    assert int(lines["requests"]) == 10
    assert "llama3-70b on a800x8" in answer.out
    assert (place / "workload.png").read_bytes().startswith(b"\x89PNG")
    named = call(workload_report.command, capsys, "synthetic", "workload.sessions=5", "--plot", "other.svg", *machine)
    assert named.status == 0, named.err
    assert (place / "other.svg").exists()


def test_workload_refuses_in_words(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    misspelt = call(workload_report.command, capsys, "sythetic")
    assert misspelt.status == 2
    assert "did you mean synthetic" in misspelt.err
    absent = call(workload_report.command, capsys, "no/such.jsonl")
    assert (absent.status, absent.out) == (2, "")
    assert "no such file" in absent.err
    key = call(workload_report.command, capsys, "synthetic", "workload.sesions=5")
    assert key.status == 2
    assert "did you mean sessions" in key.err
    row = json.loads(trace.read_text().splitlines()[0])
    trace.write_text(json.dumps({**row, "input_length": -1}) + "\n")
    broken = call(workload_report.command, capsys, str(trace))
    assert broken.status == 2
    assert "line 1, field 'input_length'" in broken.err
