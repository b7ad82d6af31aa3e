"""AIPerf's sessions: a file that its agentic-code generator wrote, and rows of our own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop
from mcjax.errors import ConfigError, TraceError
from mcjax.types import NS_PER_S
from mcjax.workload.aiperf import AIPerf
from mcjax.workload.analysis import describe
from mcjax.workload.base import Turn
from mcjax.workload.driver import Answer, ScriptBook, drive
from mcjax.workload.mooncake import Mooncake
from mcjax.workload.superposed import Superposed

GENERATED = Path(__file__).parent / "data" / "aiperf_agentic_code.jsonl"
"""docs/workload.md has the command."""

ROWS: list[dict[str, Any]] = [
    {"session_id": "a", "input_length": 10, "output_length": 3, "hash_ids": [0, 1, 2], "timestamp": 500.0},
    {"session_id": "a", "input_length": 5, "output_length": 2, "hash_ids": [7, 8], "delay": 1500.5},
    {"session_id": "b", "input_length": 9, "output_length": 1, "hash_ids": [0, 1, 9], "timestamp": 250},
    {"session_id": "a", "input_length": 1, "output_length": 0, "hash_ids": [9], "delay": 0},
    {"input_length": 4, "output_length": 1, "timestamp": 100},
]
OPTIONS: dict[str, Any] = {"block_tokens": 4, "rate_per_s": None}


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def turns_of(workload: Any) -> list[list[Turn]]:
    return [list(iter(lambda session=session: session.next_turn(None), None)) for session in workload.sessions()]


def test_prompts_grow_by_the_answer_and_the_addition(tmp_path: Path) -> None:
    single, b, a = turns_of(AIPerf(write(tmp_path / "t", *ROWS), **OPTIONS))
    assert [turn.request.prompt_tokens for turn in a] == [10, 10 + 3 + 5, 18 + 2 + 1]
    assert [turn.request.session for turn in (*a, *b, *single)] == ["a", "a", "a", "b", "row-5"]
    assert [turn.request.request_id for turn in (*a, *b, *single)] == [0, 1, 2, 3, 4]
    assert [turn.request.parent for turn in a] == [None, 0, 1]
    assert [turn.request.arrival_ns for turn in a] == [500_000_000, 1_500_500_000, 0]
    assert [turn.script.output_tokens for turn in a] == [3, 2, 1]
    ids = [list(turn.request.trace_ids or ()) for turn in (*a, *b, *single)]
    assert [len(blocks) for blocks in ids] == [3, 5, 6, 3, 1]
    assert ids[2][:5] == ids[1]
    assert ids[1][:3] == ids[0]
    assert ids[3][:2] == ids[0][:2], "full blocks of first prompts are shared by their ids"
    assert len({ids[0][2], ids[3][2], ids[4][0]}) == 3, "the rest is private, whatever numbers the file has"


def test_an_answer_that_is_cut_off_makes_later_prompts_shorter(tmp_path: Path) -> None:
    *_, a = turns_of(AIPerf(write(tmp_path / "t", *ROWS), **OPTIONS, max_tokens=2))
    assert [turn.request.prompt_tokens for turn in a] == [10, 10 + 2 + 5, 17 + 2 + 1]


def test_a_turn_is_sent_its_delay_after_the_answer(tmp_path: Path) -> None:
    log: list[tuple[float, int]] = []

    async def submit(turn: Turn) -> Answer:
        log.append((aio.now_ns() / NS_PER_S, turn.request.request_id))
        await aio.sleep_ns(10 * NS_PER_S)
        return Answer(True)

    async def main() -> None:
        await drive(AIPerf(write(tmp_path / "t", *ROWS), **OPTIONS), submit, ScriptBook())

    VirtualLoop().run(main)
    assert log == [(0.1, 4), (0.25, 3), (0.5, 0), (12.0005, 1), (22.0005, 2)]


def test_arrivals_at_a_rate_are_drawn(tmp_path: Path) -> None:
    path = write(tmp_path / "t", *ROWS)
    starts = [session.start_ns for session in AIPerf(path, 1, block_tokens=4).sessions()]
    assert starts == [session.start_ns for session in AIPerf(path, 1, block_tokens=4).sessions()]
    assert starts != [session.start_ns for session in AIPerf(path, 1, block_tokens=4).reseeded(2).sessions()]
    assert AIPerf(path, block_tokens=4, limit=1).total_requests == 3
    *_, short = turns_of(AIPerf(path, **OPTIONS, max_think_s=1))
    assert [turn.request.arrival_ns for turn in short[1:]] == [NS_PER_S, 0]


def test_the_generated_file() -> None:
    """Facts that the generator itself reports of this file (quality.json), and its layers."""
    workload = AIPerf(str(GENERATED), seed=1)
    facts = describe(workload)
    assert (facts["sessions"], facts["requests"]) == (12, workload.total_requests) == (12, 134)
    sessions = turns_of(workload)
    final = sorted(turns[-1].request.prompt_tokens / 100_000 for turns in sessions)
    assert (sum(final) / 12, (final[5] + final[6]) / 2) == pytest.approx((0.92, 0.96), abs=0.005)
    firsts: list[tuple[int, ...]] = [turns[0].request.trace_ids or () for turns in sessions]
    assert len({ids[:63] for ids in firsts}) == 1, "32,000 tokens of tools and system prompt are in every prompt"
    groups = [json.loads(line).get("group_id") for line in GENERATED.read_text().splitlines()]
    repositories = {ids[63:102] for ids in firsts}
    assert len(repositories) == len({*groups} - {None}) > 4, "then 20,000 of a repository, which some share"
    assert len({ids[103] for ids in firsts}) == 12, "then the session's own"
    assert 0.8 < facts["reuse"]["token_hit"] < 1


def test_parts_of_a_sum_never_meet() -> None:
    part = AIPerf(str(GENERATED))
    requests = [turn.request for turns in turns_of(Superposed({"x": part, "y": part})) for turn in turns]
    assert len({request.request_id for request in requests}) == 268
    mine, theirs = ({i for r in requests if r.session[0] == name for i in r.trace_ids or ()} for name in "xy")
    assert not mine & theirs


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        ({"input_length": 0}, "input_length", "must lie in 1"),
        ({"output_length": None}, "output_length", "must be a whole number"),
        ({"hash_ids": [1]}, "hash_ids", "has 1 ids, but 5 tokens make 2 blocks of 4"),
        ({"delay": None}, "delay", "must be a number of milliseconds, not None"),
        ({"delay": -1}, "delay", "must lie in 0"),
        ({"text_input": "hello"}, "text_input", "holds content"),
        ({"session_id": 3}, "session_id", "must be a string"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path: Path, change: dict[str, Any], field: str, problem: str) -> None:
    path = write(tmp_path / "t", ROWS[0], {**ROWS[1], **change})
    with pytest.raises(TraceError, match=re.escape(f"{path}, line 2, field '{field}': {problem}")):
        AIPerf(path, **OPTIONS)


def test_other_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no rows"):
        AIPerf(write(tmp_path / "t"))
    with pytest.raises(TraceError, match="line 1, field 'hash_ids'"):
        AIPerf(str(GENERATED), block_tokens=64)
    with pytest.raises(TraceError, match=r"line 2, field 'timestamp': is missing: .*workload=aiperf"):
        Mooncake(str(GENERATED))
    for key, value in {"rate_per_s": 0, "max_tokens": 0, "max_think_s": -1, "limit": 0, "seed": -1}.items():
        with pytest.raises(ConfigError, match=rf"workload\.{key}="):
            AIPerf(str(GENERATED), **{key: value})  # type: ignore[arg-type]
