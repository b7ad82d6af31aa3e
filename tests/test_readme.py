"""What the README says can be done can be done: its policy, its commands, its Python."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [text.strip() for language, text in BLOCKS if not language and text.startswith("mcjax ")]
SMALL = "workload.limit=60"


def run(arguments: list[str], place: Path, traces: Path | None = None) -> str:
    environment = {**os.environ, **({"MCJAX_TRACES": str(traces)} if traces else {})}
    done = subprocess.run(arguments, cwd=place, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_something_to_test() -> None:
    assert len(PYTHON) == 2
    assert len(COMMANDS) == 10


LONG = [
    pytest.param(text, marks=pytest.mark.check_long)
    if re.search(r"\+slices|experiment=(tiers|fig9)|launcher=", text)
    else text
    for text in COMMANDS
]


@pytest.mark.parametrize("command", LONG)
def test_commands(command: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The traces are cut short, fewer chats played and fewer schedules checked; all else is as it stands."""
    (tmp_path / "my_policy.py").write_text(PYTHON[0])
    arguments, traces = shlex.split(command)[1:], None
    if "fig9" in command:
        traces = request.getfixturevalue("traces")("mooncake_fast25_conversation.jsonl").parent
        arguments += ["backend.policies=[lru,fifo]", "backend.capacities_tokens=[1000000]"]
    elif "mooncake" in command:
        traces = request.getfixturevalue("traces")("mooncake_fast25_conversation.jsonl").parent
        arguments.append(SMALL if "+slices" not in command else "workload.limit=400")
    if "tiers" in command:
        arguments.append("workload.sessions=6")
    if "backend=check" in command:
        arguments.append("backend.schedules=5")
    assert re.search("(run|sweep) directory", run([sys.executable, "-m", "mcjax.cli", *arguments], tmp_path, traces))


def test_python(tmp_path: Path) -> None:
    (tmp_path / "my_policy.py").write_text(PYTHON[0])
    (tmp_path / "notebook.py").write_text(f"{PYTHON[1]}\nprint(run.state, run.decisions.column('strategy')[0])\n")
    assert run([sys.executable, "notebook.py"], tmp_path).split()[-2:] == ["done", "Mine"]
