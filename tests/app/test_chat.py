"""`mcjax chat`, by piping: it streams, remembers, forgets, stops, and says what came from the cache."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest_app import ROOT

from mcjax.app import chat

EXACT = ("backend.numerics=invariant", "backend.prefill_widths=auto")
SMALL = (
    "workload.max_tokens=40",
    "workload.ignore_eos=true",
    "backend.max_context_tokens=256",
    "backend.pages=32",
    "backend.pool_blocks=32",
)
QUESTION = "What is the colour of the sky over the sea?"


def started(*overrides: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu", "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", "mcjax.cli", "chat", *SMALL, *overrides]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment, bufsize=0)


def talk(typed: str, *overrides: str) -> list[str]:  # with answers that do not depend on what is cached
    """What was said after the title, cut at the remarks in brackets: text, remark, text, remark ..."""
    out, err = started(*EXACT, *overrides).communicate(typed, timeout=100)
    assert err == ""
    assert out.startswith("builtin-tiny on 1p1d. /reset")
    return re.split(r"^\((.*)\)\n", out.split("\n", 1)[1], flags=re.MULTILINE)


@pytest.fixture(scope="module")
def said() -> list[str]:
    return talk(f"{QUESTION}\n\n/nonsense\nand then?\nand then?\n/reset\n{QUESTION}\n/quit\nunread\n")


@pytest.mark.check_long
def test_a_conversation_is_remembered_until_it_is_forgotten(said: list[str]) -> None:
    first, remark, _, unknown, second, later, _, third, _, forgotten, again, last, end = said
    assert re.fullmatch(
        r"cut off after 40, first token after \d\S* m?s, [\d.,]+ tokens/s, 0 of 61 prompt tokens from the cache", remark
    )
    assert unknown.startswith("there is no /nonsense; /reset")
    assert second.strip()
    assert later.endswith("32 of 130 prompt tokens from the cache")
    assert re.search(r"\d+ of 199 prompt tokens from the cache$", third)
    assert forgotten == "forgotten"
    assert again == first
    assert last.endswith("32 of 61 prompt tokens from the cache")
    assert end == ""


def test_stop_strings_and_a_last_line_without_end(said: list[str]) -> None:
    answer = said[0]
    stop = answer[3:5]
    text, remark, rest = talk(QUESTION, f"workload.sampling.stop_strings=['{stop}']", "cluster=1p1d")
    assert text == answer[: answer.index(stop)] + "\n"
    assert "stopped" not in remark
    assert rest == "\n"


@pytest.mark.check_long
def test_a_conversation_that_outgrows_the_context_can_be_forgotten() -> None:
    long = "word " * 60
    said = talk(f"{long}\n/reset\nshort\n/quit\n")
    assert "grown too long: 317 tokens, and backend.max_context_tokens=256" in said[1]
    assert said[3] == "forgotten"
    assert said[5].endswith("of 23 prompt tokens from the cache")


@pytest.mark.check_long
def test_control_c_stops_the_answer_and_not_the_chat() -> None:
    overrides = ("workload.max_tokens=1900", "workload.ignore_eos=true", "backend.max_context_tokens=2048")
    process = started(*overrides, "backend.pages=80", "backend.pool_blocks=80")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{QUESTION}\n")
    process.stdin.flush()
    assert process.stdout.readline().startswith("builtin-tiny")
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate("/quit\n", timeout=100)
    assert err == ""
    assert re.search(r"^\(stopped, first token after .* 0 of 61 prompt tokens from the cache\)$", out, re.MULTILINE)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("backend=sim", r"mcjax: backend=sim: .*allowed: jax"),
        ("workload=synthetic", r"mcjax: workload=mcjax.workload.synthetic.Synthetic: .*allowed: text"),
        ("workload.sampling.n=2", r"mcjax: workload.sampling.n=2: a chat has one answer"),
        ("workload.sampling.top_p=2", r"mcjax: workload.sampling.top_p=2: must be a number, more than 0"),
        ("nonsense=1", "mcjax: .*nonsense"),
    ],
)
def test_mistakes(override: str, message: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.command([override]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_terminal_does_not_obey_what_a_model_says() -> None:
    assert chat.shown("a\x1b[2J\tb\n\x07\x9b é🙂") == "a\ufffd[2J\tb\n\ufffd\ufffd é🙂"
