"""Azure, BurstGPT, Qwen-Bailian and the generic format: public facts, every way a line can be wrong, fuzz."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.errors import ConfigError, TraceError
from mcjax.types import Request
from mcjax.workload import azure, bailian, burstgpt, jsonl
from mcjax.workload.azure import Azure
from mcjax.workload.bailian import Bailian
from mcjax.workload.base import Turn, Workload
from mcjax.workload.burstgpt import BurstGPT
from mcjax.workload.files import contents
from mcjax.workload.jsonl import Jsonl

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
CHAT = {
    "chat_id": 7,
    "parent_chat_id": -1,
    "timestamp": 0.5,
    "input_length": 40,
    "output_length": 9,
    "type": "text",
    "turn": 1,
    "hash_ids": [3, 4, 5],
}
ROW: dict[str, Any] = {"arrival_s": 0.5, "input_tokens": 600, "output_tokens": 9}


def turns_of(workload: Workload) -> list[Turn]:
    turns = [session.next_turn(None) for session in workload.sessions()]
    return [turn for turn in turns if turn is not None]


def requests_of(workload: Workload) -> list[Request]:
    return [turn.request for turn in turns_of(workload)]


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("name", "rows", "duration_s", "mean_input", "mean_output"),
    [("code", 8_819, 3_435.9, 2_048, 27.9), ("conv", 19_366, 3_501.7, 1_155, 211.1)],
)
def test_azure_facts(
    traces: Callable[[str], Path], name: str, rows: int, duration_s: float, mean_input: int, mean_output: float
) -> None:
    workload = Azure(str(traces(f"azure_llm_2023_{name}.csv")))
    assert workload.total_requests == rows
    assert round(max(workload.rows.arrival_ns) / 1e9, 1) == duration_s
    assert round(sum(workload.rows.input_tokens) / rows) == mean_input
    assert round(sum(workload.rows.output_tokens) / rows, 1) == mean_output
    seen: set[int] = set()
    references = 0
    for request in requests_of(Azure(str(traces(f"azure_llm_2023_{name}.csv")), limit=2000)):
        assert request.trace_ids is not None
        assert len(request.trace_ids) == -(-request.prompt_tokens // 512)
        seen.update(request.trace_ids)
        references += len(request.trace_ids)
    assert len(seen) == references, "no block may be shared"


def test_azure_requests(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    stamps = ("2023-11-16 23:59:59.9999999,513,10", "2023-11-17 00:00:00.0000001,3,9000", "2023-11-16 23:59:59,1,0")
    path.write_text(AZURE_HEADER + "\n".join(stamps))
    turns = turns_of(Azure(str(path), max_tokens=100, rate_scale=2.0))
    assert [turn.request.request_id for turn in turns] == [2, 0, 1], "in order of arrival, named by row"
    assert [turn.request.arrival_ns for turn in turns] == [0, 499_999_950, 500_000_050]
    assert [turn.request.max_tokens for turn in turns] == [100] * 3
    assert [turn.script.output_tokens for turn in turns] == [1, 10, 100]
    assert len({block for turn in turns for block in turn.request.trace_ids or ()}) == 4
    newer = AZURE_HEADER + "2024-05-10 00:00:00.009930+00:00,5,6\n2024-05-10T00:00:01Z,5,6\n"
    assert list(azure.parse_rows(newer.encode().splitlines(), "f").arrival_ns) == [0, 990_070_000]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("2023-11-16 18:17:03,5", "line"),
        ("2023-11-16 18:17:03,5,6,7", "line"),
        ('"2023', "line"),
        ("yesterday,5,6", "TIMESTAMP"),
        ("2023-13-16 18:17:03,5,6", "TIMESTAMP"),
        ("2023-11-16 18:17:03+08:00,5,6", "TIMESTAMP"),
        ("2023-11-16 18:17:03,0,6", "ContextTokens"),
        ("2023-11-16 18:17:03,five,6", "ContextTokens"),
        ("2023-11-16 18:17:03,5,-6", "GeneratedTokens"),
        ("2023-11-16 18:17:03,5,99999999999", "GeneratedTokens"),
    ],
)
def test_azure_errors_name_file_line_and_field(tmp_path: Path, line: str, field: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(AZURE_HEADER + "\n2023-11-16 18:17:03,5,6\n" + line)
    with pytest.raises(TraceError) as caught:
        Azure(str(path))
    assert (caught.value.path, caught.value.line, caught.value.field) == (str(path), 4, field)


def test_burstgpt_rows_and_filters(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text(
        "Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,s,ChatGPT,472,18,490,Conversation log\n"
        "45.5,,GPT-4,1087,230,1317,API log\n"
        "118,,GPT-4,417,0,417,API log\n"
    )
    both = requests_of(BurstGPT(str(path)))
    assert [(request.arrival_ns, request.prompt_tokens) for request in both] == [
        (5_000_000_000, 472),
        (45_500_000_000, 1087),
    ]
    assert len(requests_of(BurstGPT(str(path), keep_failed=True))) == 3
    assert [r.prompt_tokens for r in requests_of(BurstGPT(str(path), model="GPT-4"))] == [1087]
    assert [r.prompt_tokens for r in requests_of(BurstGPT(str(path), log_type="Conversation log"))] == [472]
    with pytest.raises(TraceError, match="none of the model"):
        BurstGPT(str(path), model="GPT-5")
    with pytest.raises(ConfigError, match=r"workload\.model"):
        BurstGPT(str(path), model=" ")


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens\n", 1, "Log Type"),
        (BURST_HEADER + "-1,m,1,1,2,l", 2, "Timestamp"),
        (BURST_HEADER + "nan,m,1,1,2,l", 2, "Timestamp"),
        (BURST_HEADER + "1,m,1.5,1,2,l", 2, "Request tokens"),
        (BURST_HEADER + "1,m,1,,2,l", 2, "Response tokens"),
        (BURST_HEADER, 1, "Timestamp"),
    ],
)
def test_burstgpt_errors_name_line_and_field(text: str, line: int, field: str) -> None:
    with pytest.raises(TraceError) as caught:
        burstgpt.parse_rows(text.encode().splitlines(), "f")
    assert (caught.value.line, caught.value.field) == (line, field)


def test_bailian_ids_become_chained_and_sessions_known(tmp_path: Path) -> None:
    answer = CHAT | {"chat_id": 8, "parent_chat_id": 7, "timestamp": 2, "turn": 2, "hash_ids": [3, 4, 9]}
    other = CHAT | {"chat_id": 9, "parent_chat_id": 123, "timestamp": 1, "input_length": 33, "hash_ids": [4, 3]}
    first, third, second = requests_of(Bailian(write(tmp_path / "c.jsonl", CHAT, answer, other)))
    assert [r.request_id for r in (first, second, third)] == [0, 1, 2]
    assert first.trace_ids is not None
    assert second.trace_ids is not None
    assert third.trace_ids is not None
    assert first.trace_ids[:2] == second.trace_ids[:2]
    assert not set(first.trace_ids) & set(third.trace_ids), "equal blocks after different ones are different"
    assert (second.session, second.turn, second.parent) == ("chat-7", 2, 0)
    assert (third.session, third.parent) == ("chat-9", None)
    assert first.trace_block_tokens == 16


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"timestamp": "1"}, "timestamp"),
        ({"timestamp": 1e30}, "timestamp"),
        ({"input_length": 0}, "input_length"),
        ({"output_length": 1.0}, "output_length"),
        ({"chat_id": 7}, "chat_id"),
        ({"parent_chat_id": -2}, "parent_chat_id"),
        ({"turn": None}, "turn"),
        ({"hash_ids": [1]}, "hash_ids"),
        ({"hash_ids": [1, 2, 3, 4]}, "hash_ids"),
        ({"hash_ids": [1, True, 3]}, "hash_ids"),
    ],
)
def test_bailian_errors_name_file_line_and_field(tmp_path: Path, change: dict[str, object], field: str) -> None:
    path = write(tmp_path / "c.jsonl", CHAT, CHAT | {"chat_id": 8} | change)
    with pytest.raises(TraceError) as caught:
        Bailian(path)
    assert (caught.value.path, caught.value.line, caught.value.field) == (path, 2, field)


def test_jsonl_rows_of_every_kind(tmp_path: Path) -> None:
    rows = [
        ROW | {"arrival_s": 3, "tenant": "a", "session": "s", "block_ids": [0, 2**64 - 1]},
        ROW | {"arrival_s": 4, "tenant": "a", "session": "s", "block_ids": [0, 2], "note": "ignored"},
        ROW | {"arrival_s": 4, "tenant": "b", "session": "s"},
        {"arrival_s": 1, "output_tokens": 5000, "prompt": "h\u00e9"},
        {"arrival_s": 1, "output_tokens": 0, "prompt": [9, 8], "input_tokens": 2, "tenant": None},
    ]
    workload = Jsonl(write(tmp_path / "g.jsonl", *rows))
    turns = turns_of(workload)
    by_id = {turn.request.request_id: turn for turn in turns}
    assert [turn.request.request_id for turn in turns] == [3, 4, 0, 1, 2]
    first, second, third, text, listed = (by_id[index].request for index in range(5))
    assert workload.block_tokens == 512
    assert first.trace_ids is not None
    assert second.trace_ids is not None
    assert third.trace_ids is not None
    assert first.trace_ids[0] == second.trace_ids[0]
    assert not {*first.trace_ids, *second.trace_ids} & {*third.trace_ids}
    assert (second.session, second.turn, second.parent, second.tenant) == ("s", 1, 0, "a")
    assert (third.turn, third.parent, third.tenant) == (0, None, "b")
    assert text.tokens is not None
    assert listed.tokens is not None
    assert text.tokens.tolist() == list("h\u00e9".encode())
    assert (listed.tokens.tolist(), listed.tokens.dtype, listed.trace_ids) == ([9, 8], np.int32, None)
    assert by_id[3].script.output_tokens == 2048
    only_prompts = Jsonl(write(tmp_path / "p.jsonl", *rows[3:]))
    assert only_prompts.block_tokens is None, "prompts are cut into blocks of any size"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"arrival_s": -1}, "arrival_s"),
        ({"arrival_s": float("inf")}, "arrival_s"),
        ({"input_tokens": "3"}, "input_tokens"),
        ({"output_tokens": -1}, "output_tokens"),
        ({"tenant": 3}, "tenant"),
        ({"session": ["s"]}, "session"),
        ({"block_ids": [0]}, "block_ids"),
        ({"block_ids": [1, 0]}, "block_ids"),
        ({"block_ids": [0, 2**64]}, "block_ids"),
        ({"block_ids": [0, 1], "prompt": "x"}, "prompt"),
        ({"prompt": "x"}, "input_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
    ],
)
def test_jsonl_errors_name_file_line_and_field(tmp_path: Path, change: dict[str, object], field: str) -> None:
    path = write(tmp_path / "g.jsonl", ROW | {"block_ids": [0, 1]}, ROW | change)
    with pytest.raises(TraceError) as caught:
        Jsonl(path)
    assert (caught.value.path, caught.value.line, caught.value.field) == (path, 2, field)


def test_a_missing_file_and_values_that_cannot_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for make, source in ((Azure, "AzurePublicDataset"), (BurstGPT, "HPMLL"), (Bailian, "bailian"), (Jsonl, "docs")):
        with pytest.raises(ConfigError, match=source):
            make("none")
        for key, value in (("block_tokens", 0), ("max_tokens", 0), ("rate_scale", 0.0), ("limit", 0)):
            with pytest.raises(ConfigError, match=f"workload.{key}"):
                make("none", **{key: value})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="cannot be read"):
        contents(tmp_path)
    with pytest.raises(ConfigError, match="rate_scale"):
        Jsonl(write(tmp_path / "g.jsonl", ROW), rate_scale=1e-300)


PARSERS: dict[str, Callable[[list[bytes]], object]] = {
    "azure": lambda lines: azure.parse_rows([AZURE_HEADER.encode(), *lines], "f"),
    "burstgpt": lambda lines: burstgpt.parse_rows([BURST_HEADER.encode(), *lines], "f", keep_failed=True),
    "bailian": lambda lines: bailian.parse_rows(lines, "f", 16),
    "jsonl": lambda lines: jsonl.parse_rows(lines, "f", 512),
}


def outcome(name: str, lines: list[bytes]) -> object:
    """What the parser gives, or the one error that is allowed."""
    try:
        return PARSERS[name](lines)
    except TraceError as problem:
        return problem


@pytest.mark.parametrize("name", PARSERS)
@given(lines=st.lists(st.binary(max_size=60), max_size=4))
@settings(max_examples=60)
def test_any_bytes_parse_or_raise_trace_error(name: str, lines: list[bytes]) -> None:
    parsed = outcome(name, lines)
    assert not isinstance(parsed, TraceError) or 1 <= parsed.line <= len(lines) + 1


CELL = st.sampled_from(["", "0", "7", "-1", "1e3", "nan", "2023-11-16 18:17:03.5", "0000-01-01 00:00:00"]) | st.text(
    max_size=4
)


@pytest.mark.parametrize("name", ["azure", "burstgpt"])
@given(cells=st.lists(CELL, min_size=3, max_size=6))
@settings(max_examples=100)
def test_any_cells_parse_or_raise_trace_error(name: str, cells: list[str]) -> None:
    out = io.StringIO()
    csv.writer(out).writerow(cells)
    parsed = outcome(name, [out.getvalue().encode("utf-8", "surrogatepass")])
    assert not isinstance(parsed, TraceError) or parsed.field


VALUE = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(-1, 4))


@pytest.mark.parametrize(("name", "good"), [("bailian", CHAT), ("jsonl", ROW | {"block_ids": [1, 2]})])
@given(data=st.data())
@settings(max_examples=150)
def test_any_fields_parse_or_raise_trace_error(name: str, good: dict[str, object], data: st.DataObject) -> None:
    names = [*good, "prompt", "session", "tenant"]
    rows = data.draw(st.lists(st.dictionaries(st.sampled_from(names), VALUE, max_size=2), min_size=1, max_size=3))
    parsed = outcome(name, [json.dumps(good | row).encode() for row in rows])
    if isinstance(parsed, TraceError):
        assert 1 <= parsed.line <= len(rows)
    elif isinstance(parsed, list):
        assert len(parsed) == len(rows)
