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
    assert absent.status == 2
    assert absent.err.startswith("mcjax: runs/none: no such run, neither a directory nor a name or key in runs")
    first = package.load(kept).requests.column("request_id")[0].as_py()
    unwritable = call(explain.command, capsys, str(kept), str(first), "--plot", "way.nonsense")
    assert unwritable.status == 2
    assert "--plot=way.nonsense: cannot be written" in unwritable.err


def test_explain_of_a_run_of_a_lower_level(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package.run([*SMALL, "track.level=requests"])
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


@pytest.mark.parametrize("text", ["a,b,c\n", '{"time": 1}\n', "{broken\n", "[1]\n", "\0\1\n"])
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


ROW = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n'
MISTAKES = [
    ("t.jsonl", "", "workload={path}: is empty: a trace has a request a line"),
    ("t.jsonl", "\n \n", "workload={path}: is empty: a trace has a request a line"),
    ("t.jsonl", "garbage\n", "workload={path}: its first line is of no known format (azure, "),
    (
        "t.jsonl",
        ROW + "garbage\n",
        "{path}, line 2, field 'line': is not JSON (Expecting value at column 1); it must be",
    ),
    (
        "t.jsonl",
        ROW + ROW.replace("input_length", "input_lenght"),
        "{path}, line 2, field 'input_length': is missing; there is timestamp, input_lenght, output_length, hash_ids",
    ),
    (
        "t.jsonl",
        "\n" + ROW.replace("hash_ids", "ids"),
        "{path}, line 2, field 'hash_ids': is missing in the first line, which is most like workload=mooncake: that",
    ),
    (
        "t.csv",
        "TIMESTAMP,ContextTokens,Generated\n",
        "{path}, line 1, field 'GeneratedTokens': is missing in the first line, which is most like workload=azure: ",
    ),
    (
        "t.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,6\n!!\n",
        "{path}, line 3, field 'line': has 1 fields, not 3",
    ),
    (
        "t.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,six\n",
        "{path}, line 2, field 'GeneratedTokens': must be a whole number, not 'six'",
    ),
    ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "{path}, line 1, field 'TIMESTAMP': the file holds no rows"),
    (
        "t.json",
        '{"block_size": 4,\n"requests": [',
        "{path}, line 2, field 'line': is not JSON (Expecting value at column 14)",
    ),
]


@pytest.mark.parametrize(("name", "text", "told"), MISTAKES)
def test_workload_tells_a_mistake_in_a_file_in_one_line(
    name: str, text: str, told: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = place / name
    path.write_text(text)
    answer = call(workload_report.command, capsys, str(path))
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith("mcjax: " + told.format(path=path))
    assert answer.err.count("\n") == 1
    assert not (place / "workload.png").exists()


def test_workload_tells_what_a_folder_lacks(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "folder").mkdir()
    answer = call(workload_report.command, capsys, "folder")
    assert answer.status == 2
    assert "holds neither ServeGen clients (chunk-N-trace.csv) nor Weka conversations (.json)" in answer.err
    (place / "folder" / "a.json").write_text(
        '{"block_size": 4, "requests": [{"type": "n", "t": 0, "in": 8, "out": 1}]}'
    )
    answer = call(workload_report.command, capsys, "folder")
    assert answer.status == 0, answer.err
    assert "weka" in answer.out.splitlines()[0]


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
