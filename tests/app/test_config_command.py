"""`mcjax config`: groups, options and keys as they are declared; docs/config.md is what it writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conf_options import FILES, OPTIONS
from conftest_app import ROOT, Answer

from mcjax.app import config
from mcjax.app.compose import compose
from mcjax.app.reference import everything, overview
from mcjax.app.schema.files import default_of, groups, parse, read

PAGE = ROOT / "docs" / "config.md"


def told(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert config.command(words) == 0
    return capsys.readouterr().out.splitlines()


def test_the_page_is_what_the_command_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "--markdown", str(tmp_path / "config.md"))
    assert (tmp_path / "config.md").read_bytes() == PAGE.read_bytes(), "run: mcjax config --markdown docs/config.md"


def test_groups_and_defaults_are_hydras() -> None:
    """What is read from the files is what composing them gives."""
    found = groups()
    assert {f"{name}/{option}" for name, group in found.items() for option in group.options} == set(OPTIONS)
    assert all(group.about for group in found.values()), "every group says what it is for"
    config = compose([])
    for name, group in found.items():
        if name != "experiment" and not name.startswith("hydra/"):
            assert group.default in group.options
            target = next((key.value for key in group.options[group.default].keys if key.path == "_target_"), None)
            section = config
            for part in group.key.split("."):
                section = section[part]
            assert target == section.get("_target_")


def test_every_group_has_one_line_for_each_option(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys)
    for part in overview():
        start = lines.index(f"{part.title}: {part.about}")
        shown = lines[start + 1 : start + 1 + len(part.rows)]
        assert [line.split()[0] for line in shown] == [row[0] for row in part.rows]
    assert any(line.split()[:2] == ["kvcache_centric", "default"] for line in lines)
    assert "mcjax config root" in lines[-1]


def test_a_group_shows_the_keys_of_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "sched/prefill")
    assert lines == told(capsys, "sched.prefill")
    (key,) = [line for line in lines if "balancing_threshold" in line]
    assert key.split()[:2] == ["sched.prefill.balancing_threshold", "4.0"]
    assert "a number" in key
    assert "pull a remote prefix" in key
    assert any("sched.prefill._target_" in line and "PrefillSelection" in line for line in lines), "custom needs it"


@pytest.mark.parametrize("word", ["workload=synthetic", "workload/synthetic"])
def test_an_option_shows_its_keys(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, word)
    assert lines[0] == f"workload=synthetic: {read('workload/synthetic').about}"
    shown = {line.split()[0] for line in lines[1:] if line}
    assert {f"workload.{key.path}" for key in read("workload/synthetic").keys if key.path != "_target_"} == shown
    assert any(line.split()[:4] == ["workload.sessions", "100", "a", "whole"] for line in lines)


def test_root_and_its_sections(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "root")
    keys = [line.split()[0] for line in lines if line.startswith("  ")]
    assert {"cluster", "seed", "slices", "question", "engine.lease_s", "hydra.run.dir"} <= set(keys)
    engine = told(capsys, "engine")
    assert all(line.startswith("  engine.") for line in engine[1:])
    assert set(engine) <= set(lines)
    assert any("engine.lease_s" in line and "a number of seconds, more than 0" in line for line in engine)


def test_parts_of_a_key_and_of_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert any("workload.sampling.top_p" in line and "at most 1" in line for line in told(capsys, "workload=text"))
    lines = told(capsys, "track=wandb")
    assert any("track.sinks.0.directory" in line for line in lines)
    assert any("track.sinks.1.project" in line for line in lines)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("sched/prefil", "config=sched/prefil: there is no such group or section, did you mean sched/prefill; allowed"),
        ("workload=sythetic", "workload has no option sythetic, did you mean synthetic; allowed: aiperf"),
        ("engin", "did you mean engine"),
        ("nonsense", "there is no such group or section; allowed: backend"),
    ],
)
def test_unknown_words(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert config.command([word]) == 2
    answer = capsys.readouterr()
    assert message in answer.err
    assert len(answer.err.splitlines()) == 1
    assert not answer.out


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert config.command(["--markdown", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_terminal_gets_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "300")
    lines = told(capsys, "kvpool", "sched/batching=chunked")
    text = "\n".join(lines)
    assert "takes" in text, "columns have heads here"
    assert "a whole number of bytes, 1 or more, or null" in text
    assert "sched.batching.token_budget" in text


def test_every_key_says_what_it_is() -> None:
    """Beside it, above it, or at the key that it is part of."""
    for part in everything():
        if "key" not in part.heads:
            continue
        explained = {row[0] for row in part.rows if row[3]}
        for key, *_ in part.rows:
            outer = [key[:at] for at in range(len(key) + 1) if at == len(key) or key[at] == "."]
            assert explained.intersection(outer), f"{part.title}: {key}"


def test_parsing_a_file() -> None:
    file = parse(
        "# @package _global_\n# What it is,\n# in two lines.\ndefaults:\n  - /workload@of: mooncake  # taken from\n"
        "  - override hydra/launcher: mine\nkey: 1  # beside\n# above\nother: 'a # b'\n\n# far\n\nlast: {a: 1}\n"
        "outer:  # a head\n  inner: 2  # in it\nitems:\n  - _target_: x.Y\n    one: 1  # of the first\n"
        "  - _target_: x.Z\n    two: 2  # of the second\n"
    )
    assert file.about == "What it is, in two lines."
    assert file.picks == {"workload@of": ("mooncake", "taken from"), "hydra/launcher": ("mine", "")}
    found = {key.path: (key.value, key.comment) for key in file.keys}
    assert found["key"] == ("1", "beside")
    assert found["last"] == ("{a: 1}", "")
    assert found["outer.inner"] == ("2", "in it")
    assert found["items.0.one"] == ("1", "of the first")
    assert found["items.1.two"] == ("2", "of the second")


def test_no_value_holds_what_reads_as_a_comment() -> None:
    """The files are read line by line: ` #` begins a comment, in quotes too."""
    for file in FILES:
        for key in read(file.removesuffix(".yaml")).keys:
            assert key.value.count("'") % 2 == 0 or "FAST'25" in key.value
            assert key.value.count('"') % 2 == 0


def test_a_default_as_yaml_has_it() -> None:
    assert default_of("backend/sim", "memory_share") == 0.9
    assert default_of("backend/check", "shape") is None


def test_tab_completion(fresh: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra's, which asks the command itself."""
    line = "mcjax backend=sim sched/prefill=k"
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    answer = fresh("-sc", "query=bash")
    assert (answer.status, answer.out.split()) == (0, ["sched/prefill=kvcache_centric"]), answer.err
