"""Text files as traffic: what rows mean, every way one can be wrong, and conversations that hold their real answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcjax.errors import ConfigError, TraceError
from mcjax.models.byte_tokenizer import ByteTokenizer
from mcjax.types import Request, Sampling
from mcjax.workload import text_file
from mcjax.workload.text import Talk, Text

TOKENIZER = ByteTokenizer()
END = TOKENIZER.end


def write(folder: Path, *rows: object) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def made(path: str | None, **options: Any) -> Text:
    return Text(3, path, TOKENIZER, **options)


def requests_of(workload: Text) -> list[Request]:
    turns = [session.next_turn(None) for session in workload.sessions()]
    return [turn.request for turn in turns if turn is not None]


def said(request: Request) -> str:
    assert request.tokens is not None
    return TOKENIZER.decode(request.tokens.tolist())


def play(session: Talk, answers: list[list[int] | None]) -> list[Request]:
    """The session's requests, where each is answered so; None: by the script."""
    found, turn = [], session.next_turn(None)
    for answer in answers:
        assert turn is not None
        found.append(turn.request)
        turn = session.next_turn(None if answer is None else np.array(answer, np.int32))
    assert turn is None
    return found


def test_a_plain_file_is_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes('\ufeffFirst é.\r\n\n  second {"prompt"}  \n'.encode())
    workload = made(str(path), max_tokens=9)
    assert [said(request) for request in requests_of(workload)] == [
        "User: First é.\nAssistant:",
        'User: second {"prompt"}\nAssistant:',
    ]
    assert [said(request) for request in requests_of(made(str(path), chat=False))] == ["First é.", 'second {"prompt"}']
    assert said(requests_of(made(str(path), system="Be kind.", limit=1))[0]).startswith("System: Be kind.\nUser: First")
    assert workload.total_requests == 2
    assert list(workload.inputs()) == [str(path)]
    request = requests_of(workload)[1]
    assert (request.max_tokens, request.sampling) == (9, Sampling(seed=1000, stop_tokens=(END,)))
    assert request.tokens is not None
    assert not request.tokens.flags.writeable
    assert request.prompt_tokens == len(request.tokens)


def test_a_row_says_what_it_wants(tmp_path: Path) -> None:
    row = {
        "prompt": "Hi", "max_tokens": 7, "temperature": 1, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 2**40,
        "stop": ["x", "yy"], "min_tokens": 2, "repetition_penalty": 1.5, "presence_penalty": -1.0,
        "frequency_penalty": 0.5, "logprobs": 2, "n": 2, "ignore_eos": True, "tenant": "lab", "priority": -3,
        "arrival_s": 1.5, "output_tokens": 5,
    }  # fmt: skip
    workload = made(write(tmp_path, row, {"prompt": "a", "arrival_s": 0, "stop": "z", "top_p": None}))
    second, first = [session.next_turn(None) for session in workload.sessions()]
    assert first is not None
    assert second is not None
    assert first.request.sampling == Sampling(
        1.0, 2**40, (), ("x", "yy"), 2, 3, 0.5, 0.1, 1.5, -1.0, 0.5, logprobs=2, n=2
    )
    assert (first.request.arrival_ns, first.request.tenant, first.request.priority) == (1_500_000_000, "lab", -3)
    assert (first.request.max_tokens, first.script.output_tokens) == (7, 5)
    assert first.script.tokens is not None
    assert len(first.script.tokens) == 5
    assert second.request.sampling.stop_strings == ("z",)
    assert second.request.sampling.stop_tokens == (END,)
    assert second.script.output_tokens == second.request.max_tokens == 128


def test_defaults_of_the_sampler_and_what_a_row_puts_in_their_place(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a"}, {"prompt": "b", "temperature": 0.0, "seed": 1})
    defaults = {"temperature": 0.8, "top_k": 5, "seed": 0, "stop_strings": ["q"], "logprobs": None}
    first, second = (request.sampling for request in requests_of(made(path, sampling=defaults, ignore_eos=True)))
    assert first == Sampling(0.8, 0, (), ("q",), top_k=5)
    assert second == Sampling(0.0, 1, (), ("q",), top_k=5)
    with pytest.raises(ConfigError, match=r"workload\.sampling\.topk=1.*top_k"):
        made(path, sampling={"topk": 1})
    with pytest.raises(ConfigError, match=r"workload\.sampling\.top_p=7: must be"):
        made(path, sampling={"top_p": 7})


def test_later_turns_hold_the_answers_as_they_came(tmp_path: Path) -> None:
    path = write(tmp_path, {"turns": ["one", "two", "three"], "system": "S"})
    (session,) = made(path).sessions()
    cut_off, ended = [*b" \xff half"], [*b" done", END]
    first, second, third = play(session, [cut_off, ended, [1]])
    assert [request.turn for request in (first, second, third)] == [0, 1, 2]
    assert (third.request_id, third.parent, third.session) == (2, 1, "default-0")
    assert said(first) == "System: S\nUser: one\nAssistant:"
    assert first.tokens is not None
    assert second.tokens is not None
    assert third.tokens is not None
    wanted = [*first.tokens.tolist(), *cut_off, END, *b"\nUser: two", END, *b"\nAssistant:"]
    assert second.tokens.tolist() == wanted
    assert third.tokens.tolist() == [*wanted, *ended, *b"\nUser: three", END, *b"\nAssistant:"]


def test_without_logits_a_session_goes_by_its_script(tmp_path: Path) -> None:
    path = write(tmp_path, {"turns": ["one", "two"], "output_tokens": 40, "max_tokens": 30})
    (session,) = made(path).sessions()
    turn = session.next_turn(None)
    assert turn is not None
    again = session.next_turn(None)
    assert again is not None
    assert again.request.tokens is not None
    assert turn.script.tokens is not None
    assert len(turn.script.tokens) == 30
    start = turn.request.prompt_tokens
    assert again.request.tokens[start : start + 30].tolist() == turn.script.tokens.tolist()


def test_messages_go_as_they_are_and_contents_are_no_control_tokens(tmp_path: Path) -> None:
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    (request,) = requests_of(made(write(tmp_path, {"messages": messages}), system="unused"))
    assert said(request) == "System: s\nUser: u\nAssistant: a\nUser: u\nAssistant:"


def test_long_prompts_end_a_session_and_are_refused_in_a_first_turn(tmp_path: Path) -> None:
    path = write(tmp_path, {"turns": ["a", "b"]})
    (session,) = made(path, max_prompt_tokens=40).sessions()
    assert len(play(session, [[1] * 30])) == 1
    with pytest.raises(TraceError, match=r"line 1, field 'turns': is 19 tokens long.*max_prompt_tokens=5"):
        made(path, max_prompt_tokens=5)


def test_arrivals_are_drawn_or_all_at_once_and_sessions_come_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, *[{"prompt": str(index)} for index in range(20)])
    drawn = [session.start_ns for session in made(path, rate_per_s=2.0).sessions()]
    assert drawn == sorted(drawn)
    assert 0 < drawn[-1] < 60e9
    assert [session.start_ns for session in made(path, rate_per_s=2.0).reseeded(4).sessions()] != drawn
    assert {session.start_ns for session in made(path, rate_per_s=None).sessions()} == {0}
    path = write(tmp_path, *[{"prompt": str(index), "arrival_s": at} for index, at in enumerate([2, 1, 1, 0])])
    assert [request.request_id for request in requests_of(made(path))] == [3000, 1000, 2000, 0]


def test_the_questions_that_are_shipped() -> None:
    workload = made(None)
    assert len(list(workload.sessions())) == 20
    assert workload.total_requests == 25
    assert said(requests_of(made(None, limit=1))[0]).startswith("User: What is the capital of France?")


@pytest.mark.parametrize(
    ("row", "field", "message"),
    [
        ("{", "line", "is not JSON"),
        ([], "line", "JSON object"),
        ({}, "prompt", "exactly one of prompt, messages, turns; there is none"),
        ({"prompt": "a", "turns": ["b"]}, "prompt", "there is prompt and turns"),
        ({"prompt": "a", "temprature": 1}, "temprature", "did you mean temperature?"),
        ({"prompt": "a", "zzz": 1}, "zzz", "there is prompt, messages"),
        ({"prompt": 5}, "prompt", "must be a text"),
        ({"prompt": ""}, "prompt", "must not be empty"),
        ({"prompt": "a\ud83d"}, "prompt", "surrogate"),
        ({"prompt": "a", "system": "b"}, "system", "written as messages"),
        ({"turns": []}, "turns", "list of texts"),
        ({"turns": ["a", ""]}, "turns", "list of texts"),
        ({"turns": ["a"] * 1001}, "turns", "more than 1000"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": ["a"]}, "messages[0]", "must be an object"),
        ({"messages": [{"role": "boss", "content": "a"}]}, "messages[0].role", "one of system, user"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name", "no field of a message"),
        ({"messages": [{"role": "user", "content": "a"}], "system": "b"}, "system", "it is the first"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "must lie in 1"),
        ({"prompt": "a", "output_tokens": 1.5}, "output_tokens", "whole number"),
        ({"prompt": "a", "temperature": "hot"}, "temperature", "must be a number"),
        ({"prompt": "a", "temperature": -1}, "temperature", "must be 0 or more"),
        ({"prompt": "a", "top_p": 0}, "top_p", "must be above 0"),
        ({"prompt": "a", "seed": -1}, "seed", "must lie in 0"),
        ({"prompt": "a", "n": 0}, "n", "at least 1"),
        ({"prompt": "a", "stop": [""]}, "stop", "list of texts"),
        ({"prompt": "a", "stop": ""}, "stop_strings", "empty string"),
        ({"prompt": "a", "ignore_eos": 1}, "ignore_eos", "true or false"),
        ({"prompt": "a", "tenant": 1}, "tenant", "must be a text"),
        ({"prompt": "a", "arrival_s": -1}, "arrival_s", "must lie in 0"),
        ({"prompt": "a", "arrival_s": 1}, "arrival_s", "in every row, or in none"),
    ],
)
def test_what_is_wrong_with_a_row_names_line_and_field(tmp_path: Path, row: object, field: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    text = row if isinstance(row, str) else json.dumps(row)
    path.write_text('{"prompt": "fine"}\n\n' + text + "\n")
    with pytest.raises(TraceError) as caught:
        made(str(path))
    assert (caught.value.line, caught.value.field) == (3, field)
    assert message in str(caught.value)


def test_files_that_hold_nothing_or_no_text(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text("\n \n")
        with pytest.raises(TraceError, match="holds no prompts"):
            made(str(tmp_path / name))
    (tmp_path / "b.txt").write_bytes(b"fine\n\xff\n")
    with pytest.raises(TraceError, match=r"line 2, field 'line': is not UTF-8"):
        made(str(tmp_path / "b.txt"))
    with pytest.raises(ConfigError, match=r"workload\.path=nowhere"):
        made("nowhere")
    with pytest.raises(ConfigError, match=r"workload\.tokenizer"):
        Text(0)


def test_a_prompt_without_tokens_and_a_template_that_refuses(tmp_path: Path) -> None:
    class Mute(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return []

    path = write(tmp_path, {"prompt": "a"})
    with pytest.raises(TraceError, match=r"line 1, field 'prompt': comes to no token"):
        Text(0, path, Mute(), chat=False)

    class Strict(ByteTokenizer):
        def apply_chat_template(self, messages: Any, add_generation_prompt: bool = True) -> list[int]:
            from mcjax.errors import ChatTemplateError

            raise ChatTemplateError("no system message here")

    with pytest.raises(TraceError, match=r"line 1, field 'prompt': no system message"):
        Text(0, path, Strict())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([1e400, "a", "user", 0.5]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["role", "content"]), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*text_file.FIELDS, "other"]), JSON, max_size=4))
def test_whatever_a_row_holds_is_read_or_refused(row: dict[str, Any]) -> None:
    try:
        (found,) = text_file.parse([json.dumps(row).encode()], "x.jsonl")
    except TraceError:
        return
    assert (found.prompt is not None) + bool(found.turns) + ("messages" in row) >= 1
