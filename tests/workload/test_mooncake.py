"""Mooncake traces: facts of the published files, every way a line can be wrong, and requests that keep their secret."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.errors import ConfigError, TraceError
from mcjax.workload.files import find
from mcjax.workload.mooncake import Mooncake
from mcjax.workload.mooncake_file import Rows, parse_rows

GOOD = {"timestamp": 10, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


def lines(*rows: object) -> list[bytes]:
    return [json.dumps(row).encode() + b"\n" for row in rows]


def write(path: Path, *rows: object) -> str:
    path.write_bytes(b"".join(lines(*rows)))
    return str(path)


def published(name: str) -> str:
    """A file of the public traces, by either of the names it goes by. Skips where the traces are not."""
    folder = Path(os.environ.get("MCJAX_TRACES", "traces"))
    for candidate in (folder / f"{name}_trace.jsonl", folder / f"mooncake_fast25_{name}.jsonl"):
        if candidate.is_file():
            return str(candidate.absolute())
    if os.environ.get("CI") == "true" and "MCJAX_TRACES" in os.environ:
        pytest.fail(f"MCJAX_TRACES={folder} holds no {name} trace")
    pytest.skip(f"no {name} trace in {folder}; set MCJAX_TRACES to the folder that holds the Mooncake traces")


@pytest.mark.parametrize(
    ("name", "requests", "mean_input", "mean_output", "references", "unique", "hit"),
    [
        ("conversation", 12_031, 12_035, 343, 288_500, 182_790, 0.3664),
        ("synthetic", 3_993, 15_325, 149, 121_877, 43_924, 0.6396),
    ],
)
def test_published_trace_facts(
    name: str, requests: int, mean_input: int, mean_output: int, references: int, unique: int, hit: float
) -> None:
    workload = Mooncake(published(name))
    count = input_tokens = output_tokens = hits = total = 0
    seen: set[int] = set()
    last_ns = 0
    for session in workload.sessions():
        turn = session.next_turn(None)
        assert turn is not None
        assert turn.request.trace_ids is not None
        count += 1
        input_tokens += turn.request.prompt_tokens
        output_tokens += turn.script.output_tokens
        total += len(turn.request.trace_ids)
        hits += sum(block in seen for block in turn.request.trace_ids)
        seen.update(turn.request.trace_ids)
        assert session.start_ns == turn.request.arrival_ns >= last_ns
        last_ns = session.start_ns
    assert (count, total, len(seen)) == (requests, references, unique)
    assert round(input_tokens / count) == mean_input
    assert round(output_tokens / count) == mean_output
    assert round(hits / total, 4) == hit


def test_requests_and_scripts(tmp_path: Path) -> None:
    long = {"timestamp": 10, "input_length": 512, "output_length": 9000, "hash_ids": [0]}
    mute = {"timestamp": 3010, "input_length": 1, "output_length": 0, "hash_ids": [7], "extra": "ignored"}
    workload = Mooncake(write(tmp_path / "t.jsonl", GOOD, long, mute), max_tokens=100)
    turns = [session.next_turn(None) for session in workload.sessions()]
    requests = [turn.request for turn in turns if turn is not None]
    assert [request.request_id for request in requests] == [0, 1, 2]
    assert [request.arrival_ns for request in requests] == [10_000_000, 10_000_000, 3_010_000_000]
    assert [request.max_tokens for request in requests] == [100] * 3, "max_tokens must not tell the output length"
    assert [request.trace_ids for request in requests] == [(0, 1), (0,), (7,)]
    assert all(request.trace_block_tokens == 512 and request.tokens is None for request in requests)
    assert [turn.script.output_tokens for turn in turns if turn is not None] == [5, 100, 1]


def test_a_session_has_one_turn(tmp_path: Path) -> None:
    session = next(Mooncake(write(tmp_path / "t.jsonl", GOOD)).sessions())
    assert session.next_turn(None) is not None
    assert session.next_turn(None) is None


def test_rate_scale_and_limit(tmp_path: Path) -> None:
    rows = [GOOD | {"timestamp": ms} for ms in (0, 1000, 2500)]
    workload = Mooncake(write(tmp_path / "t.jsonl", *rows), rate_scale=2.0, limit=2)
    assert [session.start_ns for session in workload.sessions()] == [0, 500_000_000]


def test_inputs_hash_the_whole_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, GOOD)
    expected = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    assert Mooncake(path, limit=1).inputs() == {path: expected}


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (b"{", "line"),
        (b"\xff\xfe", "line"),
        (b"[1]", "line"),
        (b'{"timestamp": ' + b"9" * 5000 + b"}", "line"),
        (b"[" * 100_000, "line"),
        *[(name, name) for name in GOOD],
        ({"timestamp": "10"}, "timestamp"),
        ({"timestamp": True}, "timestamp"),
        ({"timestamp": -1}, "timestamp"),
        ({"timestamp": float("nan")}, "timestamp"),
        ({"timestamp": 10**30}, "timestamp"),
        ({"timestamp": 9}, "timestamp"),
        ({"input_length": 600.0}, "input_length"),
        ({"input_length": 0}, "input_length"),
        ({"input_length": 10**4000}, "input_length"),
        ({"output_length": None}, "output_length"),
        ({"output_length": -3}, "output_length"),
        ({"hash_ids": 3}, "hash_ids"),
        ({"hash_ids": [0]}, "hash_ids"),
        ({"hash_ids": [0, 1, 2]}, "hash_ids"),
        ({"hash_ids": [0, "1"]}, "hash_ids"),
        ({"hash_ids": [0, -1]}, "hash_ids"),
        ({"hash_ids": [0, 2**63]}, "hash_ids"),
        ({"hash_ids": [0, 0]}, "hash_ids"),
        ({"hash_ids": [1, 0]}, "hash_ids"),
        ({"hash_ids": [5, 1]}, "hash_ids"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_name_file_line_and_field(tmp_path: Path, bad: bytes | str | dict[str, object], field: str) -> None:
    if isinstance(bad, bytes):
        broken = bad
    elif isinstance(bad, str):
        broken = json.dumps({name: value for name, value in GOOD.items() if name != bad}).encode()
    else:
        broken = json.dumps(GOOD | bad).encode()
    path = tmp_path / "t.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n" + broken)
    with pytest.raises(TraceError) as caught:
        Mooncake(str(path))
    assert (caught.value.path, caught.value.line, caught.value.field) == (str(path), 3, field)
    assert len(str(caught.value)) < 400 + len(str(path))


def test_the_first_wrong_chain_is_named(tmp_path: Path) -> None:
    wrong = [GOOD | {"hash_ids": ids} for ids in ([0, 1], [5, 1], [0, 5], [7, 0])]
    with pytest.raises(TraceError, match="id 1 at index 1") as caught:
        Mooncake(write(tmp_path / "t.jsonl", *wrong))
    assert caught.value.line == 2


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no rows"):
        Mooncake(write(tmp_path / "t.jsonl"))


def outcome(file: list[bytes], block_tokens: int) -> Rows | TraceError:
    """The rows, or the one error that is allowed."""
    try:
        return parse_rows(file, "f", block_tokens)
    except TraceError as problem:
        return problem


@given(st.lists(st.binary(max_size=60), max_size=4))
@settings(max_examples=150)
def test_any_bytes_parse_or_raise_trace_error(pieces: list[bytes]) -> None:
    rows = outcome([*lines(GOOD), *pieces], 512)
    assert rows.line >= 2 if isinstance(rows, TraceError) else len(rows) >= 1


VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "timestamp": st.integers(0, 5) | VALUE,
                "input_length": st.integers(1, 4) | VALUE,
                "output_length": st.integers(0, 4) | VALUE,
                "hash_ids": st.lists(st.integers(0, 3), max_size=2) | VALUE,
            },
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=300)
def test_any_fields_give_sound_rows_or_raise_trace_error(rows: list[dict[str, object]]) -> None:
    parsed = outcome(lines(*rows), 2)
    if isinstance(parsed, TraceError):
        assert 1 <= parsed.line <= len(rows)
        return
    assert list(parsed.timestamp_ns) == sorted(parsed.timestamp_ns)
    parents: dict[int, int] = {}
    for index in range(len(parsed)):
        ids = parsed.block_ids(index)
        assert len(ids) == -(-parsed.input_tokens[index] // 2)
        for parent, block in zip((-1, *ids), ids, strict=False):
            assert parents.setdefault(block, parent) == parent


def test_path_is_found_as_given_then_in_the_variable_then_in_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    variable = tmp_path / "variable"
    for folder, stamp in ((tmp_path, 1), (variable, 2), (tmp_path / "traces", 3)):
        folder.mkdir(exist_ok=True)
        write(folder / "t.jsonl", GOOD | {"timestamp": stamp})
    monkeypatch.setenv("MCJAX_TRACES", str(variable))

    def found() -> int:
        return next(Mooncake("t.jsonl").sessions()).start_ns // 1_000_000

    assert found() == 1
    (tmp_path / "t.jsonl").unlink()
    assert found() == 2
    monkeypatch.delenv("MCJAX_TRACES")
    assert found() == 3


def test_a_missing_path_says_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MCJAX_TRACES", str(tmp_path / "variable"))
    with pytest.raises(ConfigError) as caught:
        Mooncake("none.jsonl")
    assert caught.value.key == "workload.path"
    for place in ("none.jsonl", str(tmp_path / "variable" / "none.jsonl"), str(Path("traces") / "none.jsonl")):
        assert place in str(caught.value)


def test_a_published_name_with_other_bytes_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "toolagent_trace.jsonl", GOOD)
    with pytest.raises(ConfigError, match="verify_published"):
        Mooncake(path)
    assert len(Mooncake(path, verify_published=False).rows) == 1


@pytest.mark.parametrize(
    "setting", [{"rate_scale": 0}, {"max_tokens": 0}, {"block_tokens": 0}, {"limit": 0}, {"rate_scale": 1e-300}]
)
def test_values_that_cannot_work(tmp_path: Path, setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"workload.{next(iter(setting))}"):
        Mooncake(write(tmp_path / "t.jsonl", GOOD), **setting)  # pyright: ignore[reportArgumentType]


def test_memory_of_a_large_trace(tmp_path: Path) -> None:
    """23,608 rows of 24 blocks, the size of the largest public trace, stay under 60 MB."""
    path = tmp_path / "t.jsonl"
    with path.open("w") as file:
        for row in range(23_608):
            ids = [0, *range(row * 23 + 1, row * 23 + 24)]
            line = {"timestamp": row * 150, "input_length": 12_288, "output_length": 343, "hash_ids": ids}
            file.write(json.dumps(line) + "\n")
    tracemalloc.start()
    try:
        count = sum(session.next_turn(None) is not None for session in Mooncake(str(path)).sessions())
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 23_608
    assert peak_bytes < 60e6


def test_a_trace_is_found_by_its_published_name_where_a_collection_calls_it_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "mooncake_fast25_conversation.jsonl"
    kept.write_text("")
    monkeypatch.setenv("MCJAX_TRACES", str(tmp_path))
    assert find("conversation_trace.jsonl", "") == kept
    published = tmp_path / "conversation_trace.jsonl"
    published.write_text("")
    assert find("conversation_trace.jsonl", "") == published
