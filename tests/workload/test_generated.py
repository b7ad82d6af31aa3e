"""The generated workloads, chat and synthetic: limits, sharing, determinism, independence."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import mcjax
from mcjax.errors import ConfigError
from mcjax.types import Tokenizer, Tokens
from mcjax.workload.azure import Azure
from mcjax.workload.bailian import Bailian
from mcjax.workload.base import Turn, Workload
from mcjax.workload.burstgpt import BurstGPT
from mcjax.workload.chat import Chat
from mcjax.workload.jsonl import Jsonl
from mcjax.workload.mooncake import Mooncake
from mcjax.workload.servegen import ServeGen
from mcjax.workload.synthetic import Synthetic


def play(workload: Workload) -> list[list[Turn]]:
    """Every session to its end, by the scripts."""
    played: list[list[Turn]] = []
    for session in workload.sessions():
        turns: list[Turn] = []
        turn = session.next_turn(None)
        while turn is not None:
            turns.append(turn)
            turn = session.next_turn(None)
        played.append(turns)
    return played


def flat(workload: Workload) -> list[Turn]:
    return [turn for turns in play(workload) for turn in turns]


def tokens_of(turn: Turn) -> Tokens:
    assert turn.request.tokens is not None
    return turn.request.tokens


def facts(turn: Turn) -> tuple[Any, ...]:
    request = turn.request
    assert turn.script.tokens is not None
    return (
        request.request_id,
        request.arrival_ns,
        request.max_tokens,
        request.tenant,
        request.session,
        request.turn,
        request.parent,
        request.priority,
        request.hints,
        tokens_of(turn).tobytes(),
        turn.script.output_tokens,
        turn.script.tokens.tobytes(),
    )


WORKLOADS = [lambda seed: Chat(seed), lambda seed: Synthetic(seed, sessions=20, few_shot_tokens=10, hints=True)]


@pytest.mark.parametrize("make", WORKLOADS)
def test_a_function_of_the_seed(make: Any) -> None:
    first = [facts(turn) for turn in flat(make(2**64 - 1))]
    workload = make(2**64 - 1)
    assert first == [facts(turn) for turn in flat(workload)]
    assert first == [facts(turn) for turn in flat(workload)], "asking twice must give the same sessions"
    assert first != [facts(turn) for turn in flat(make(5))]


@pytest.mark.parametrize("make", WORKLOADS)
def test_a_turn_continues_the_one_before(make: Any) -> None:
    ids: set[int] = set()
    last_start_ns = -1
    for turns in play(make(3)):
        for index, turn in enumerate(turns):
            request = turn.request
            assert request.request_id not in ids
            ids.add(request.request_id)
            assert request.turn == index
            assert request.session == turns[0].request.session
            assert tokens_of(turn).dtype == np.int32
            assert len(tokens_of(turn)) == request.prompt_tokens
            assert not tokens_of(turn).flags.writeable, "the session's history must not be changed by an executor"
            assert turn.script.tokens is not None
            assert len(turn.script.tokens) == turn.script.output_tokens
            if index == 0:
                assert request.parent is None
                assert request.arrival_ns >= last_start_ns
                last_start_ns = request.arrival_ns
                continue
            before = turns[index - 1]
            assert before.script.tokens is not None
            assert request.parent == before.request.request_id
            said = np.concatenate([tokens_of(before), before.script.tokens])
            assert np.array_equal(tokens_of(turn)[: len(said)], said)
            assert len(tokens_of(turn)) > len(said)


@pytest.mark.parametrize("make", WORKLOADS)
def test_the_real_answer_replaces_the_script(make: Any) -> None:
    answer = np.array([7, 7, 7], np.int32)
    turns = ((session.next_turn(None), session.next_turn(answer)) for session in make(3).sessions())
    first, second = next((first, second) for first, second in turns if second is not None)
    assert first is not None
    start = first.request.prompt_tokens
    assert tokens_of(second)[start : start + 3].tolist() == [7, 7, 7]


@pytest.mark.parametrize("seed", range(8))
def test_chat_is_the_demo_it_says_it_is(seed: int) -> None:
    played = play(Chat(seed))
    assert [len(turns) for turns in played] == [4] * 12
    lengths = [turn.request.prompt_tokens for turns in played for turn in turns]
    assert 200 <= min(lengths) < 500
    assert 1000 < max(lengths) <= 1500
    for turns in played:
        for turn in turns:
            assert 64 <= turn.request.max_tokens <= 96
            assert turn.script.output_tokens == turn.request.max_tokens
            assert tokens_of(turn).min() >= 0
            assert tokens_of(turn).max() <= 127
    tenants = [turns[0].request.tenant for turns in played]
    assert tenants.count("helpdesk") == tenants.count("research") == 6


def test_chat_makes_300_requests_of_75_sessions() -> None:
    assert len(flat(Chat(1, sessions=75))) == 300


def test_chat_shares_a_system_prompt_within_a_tenant_only() -> None:
    first_prompts = {turns[0].request.session: tokens_of(turns[0]) for turns in play(Chat(4))}

    def common(a: Tokens, b: Tokens) -> int:
        length = min(len(a), len(b))
        differ = np.flatnonzero(a[:length] != b[:length])
        return int(differ[0]) if len(differ) else length

    assert common(first_prompts["helpdesk-0"], first_prompts["helpdesk-2"]) > 200
    assert common(first_prompts["research-1"], first_prompts["research-3"]) > 200
    assert common(first_prompts["helpdesk-0"], first_prompts["research-1"]) < 50


class Words:
    """A tokenizer of one token a word."""

    vocab_size = 1000

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join("x" * token for token in tokens)


def test_chat_counts_in_the_tokens_of_its_tokenizer() -> None:
    for turn in flat(Chat(1, tokenizer=cast("Tokenizer", Words()))):
        assert 64 <= turn.script.output_tokens <= 96
        assert turn.script.tokens is not None
        assert len(turn.script.tokens) == turn.script.output_tokens
        assert turn.request.prompt_tokens <= 1500
        assert tokens_of(turn).max() < 20


RANGE = st.tuples(st.integers(1, 40), st.integers(0, 40)).map(lambda ends: [ends[0], ends[0] + ends[1]])


@given(
    seed=st.integers(0, 2**64 - 1),
    turns=st.integers(1, 6),
    first=RANGE,
    user=RANGE,
    output=RANGE,
    limit=st.integers(120, 400),
    vocab=st.integers(1, 70_000),
    few_shot=st.integers(0, 20),
)
@settings(max_examples=60, deadline=None)
def test_synthetic_keeps_its_limits(
    seed: int, turns: int, first: list[int], user: list[int], output: list[int], limit: int, vocab: int, few_shot: int
) -> None:
    workload = Synthetic(
        seed,
        sessions=4,
        tenants={"a": {"system_prompt_tokens": 16}, "b": {}},
        turns=[1, turns],
        first_prompt_tokens=first,
        user_tokens=user,
        output_tokens=output,
        max_tokens=100,
        vocab_size=vocab,
        few_shot_tokens=few_shot,
        max_prompt_tokens=limit,
    )
    for played in play(workload):
        assert 1 <= len(played) <= turns
        for turn in played:
            assert turn.request.prompt_tokens <= limit
            assert turn.request.max_tokens == 100, "max_tokens must not tell the output length"
            assert output[0] <= turn.script.output_tokens <= output[1]
            assert tokens_of(turn).min() >= 0
            assert tokens_of(turn).max() < vocab


@pytest.mark.parametrize(("limit", "turns"), [(30, 3), (29, 2), (20, 2), (19, 1)])
def test_a_session_ends_exactly_at_its_limit(limit: int, turns: int) -> None:
    lengths: dict[str, Any] = {"first_prompt_tokens": 10, "user_tokens": 5, "output_tokens": 5}
    workload = Synthetic(1, sessions=1, tenants={"a": {}}, turns=9, max_prompt_tokens=limit, **lengths)
    session = next(workload.sessions())
    sent = [turn.request.prompt_tokens for turn in iter(lambda: session.next_turn(None), None)]
    assert sent == [10, 20, 30][:turns]
    assert session.next_turn(None) is None, "an ended session stays ended"


@pytest.mark.parametrize("make", WORKLOADS)
def test_no_two_turns_say_the_same(make: Any) -> None:
    said: list[bytes] = []
    for turns in play(make(6)):
        end = 0
        for turn in turns:
            said.append(tokens_of(turn)[end:].tobytes())
            end = turn.request.prompt_tokens
    assert len(set(said)) == len(said)


@pytest.mark.parametrize(
    "change",
    [
        {"turns": [2, 9]},
        {"output_tokens": [1, 5]},
        {"first_prompt_tokens": 3},
        {"think_time_s": 9.0},
        {"tenants": {"other": {"system_prompt_tokens": 7}}},
        {"few_shot_tokens": 5, "few_shot_groups": 3},
        {"vocab_size": 9},
    ],
    ids=str,
)
def test_arrivals_depend_on_no_other_setting(change: dict[str, Any]) -> None:
    assert [session.start_ns for session in Synthetic(8, sessions=30).sessions()] == [
        session.start_ns for session in Synthetic(8, sessions=30, **change).sessions()
    ]


def test_more_sessions_change_none_of_the_first() -> None:
    few = [facts(turn) for turn in flat(Synthetic(8, sessions=5))]
    assert [facts(turn) for turn in flat(Synthetic(8, sessions=9))][: len(few)] == few


def test_interleaving_does_not_matter() -> None:
    expected = sorted(facts(turn) for turn in flat(Synthetic(8, sessions=6)))
    sessions = list(Synthetic(8, sessions=6).sessions())
    seen: list[tuple[Any, ...]] = []
    while sessions:
        for session in sessions[::-1]:
            turn = session.next_turn(None)
            if turn is None:
                sessions.remove(session)
            else:
                seen.append(facts(turn))
    assert sorted(seen) == expected


def test_few_shot_prefix_is_shared_by_a_group() -> None:
    tenants = {"a": {"system_prompt_tokens": 10}}
    workload = Synthetic(8, sessions=40, tenants=tenants, few_shot_tokens=20, few_shot_groups=3, vocab_size=1000)
    first_prompts = [tokens_of(turns[0]) for turns in play(workload)]
    assert len({prompt[:10].tobytes() for prompt in first_prompts}) == 1
    assert len({prompt[:30].tobytes() for prompt in first_prompts}) == 3
    assert len({prompt[:60].tobytes() for prompt in first_prompts}) == 40


def test_shares_and_priorities() -> None:
    turns = [played[0].request for played in play(Synthetic(8, sessions=2000, turns=1, vocab_size=4))]
    interactive = [request for request in turns if request.tenant == "interactive"]
    assert 0.65 < len(interactive) / len(turns) < 0.75
    assert {request.priority for request in interactive} == {1}


def test_hints_are_given_only_when_asked_for() -> None:
    assert all(turn.request.hints == () for turn in flat(Synthetic(8, sessions=9)))
    for played in play(Synthetic(8, sessions=9, hints=True, think_time_s=3.0)):
        kinds = [[hint.kind for hint in turn.request.hints] for turn in played]
        assert kinds[0][0] == "share"
        assert kinds[-1][-1] == "demote"
        assert all(kind[-1] == "retain" for kind in kinds[:-1])
        for turn in played:
            assert all(hint.tokens <= turn.request.prompt_tokens for hint in turn.request.hints)
            assert all(hint.ttl_s == 6.0 for hint in turn.request.hints if hint.kind == "retain")


@pytest.mark.parametrize(
    ("make", "setting", "key"),
    [
        (Synthetic, {"turns": [3, 1]}, "turns"),
        (Synthetic, {"turns": [1, 2, 3]}, "turns"),
        (Synthetic, {"turns": [1, 2.5]}, "turns"),
        (Synthetic, {"turns": 1001}, "turns"),
        (Synthetic, {"output_tokens": [1, 300]}, "output_tokens"),
        (Synthetic, {"max_prompt_tokens": 700}, "max_prompt_tokens"),
        (Synthetic, {"rate_per_s": 0}, "rate_per_s"),
        (Synthetic, {"rate_per_s": float("nan")}, "rate_per_s"),
        (Synthetic, {"tenants": {}}, "tenants"),
        (Synthetic, {"tenants": {"a": {"share": 0}}}, "tenants"),
        (Synthetic, {"tenants": {"a": {"prioritty": 0}}}, "tenants.a.prioritty"),
        (Synthetic, {"tenants": {"a": {"share": -1}}}, "tenants.a.share"),
        (Chat, {"max_prompt_tokens": 400}, "max_prompt_tokens"),
        (Synthetic, {"tenants": {"a": {"priority": "high"}}}, "tenants.a.priority"),
        (Synthetic, {"sessions": "many"}, "sessions"),
        (Synthetic, {"sessions": 2.5}, "sessions"),
        (Synthetic, {"turns": "ab"}, "turns"),
        (Synthetic, {"think_time_s": "long"}, "think_time_s"),
        (Synthetic, {"max_prompt_tokens": "x"}, "max_prompt_tokens"),
        (Chat, {"max_prompt_tokens": None}, "max_prompt_tokens"),
        (Chat, {"sessions": 0}, "sessions"),
        (Chat, {"turns": 0}, "turns"),
        (Chat, {"seed": -1}, "seed"),
    ],
    ids=str,
)
def test_values_that_cannot_work_name_their_key(make: Any, setting: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**{"seed": 1} | setting)
    assert caught.value.key == f"workload.{key}"


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("chat", Chat),
        ("synthetic", Synthetic),
        ("mooncake", Mooncake),
        ("azure", Azure),
        ("bailian", Bailian),
        ("burstgpt", BurstGPT),
        ("jsonl", Jsonl),
        ("servegen", ServeGen),
    ],
)
def test_yaml_repeats_the_defaults_of_the_code(name: str, made: Any) -> None:
    """One truth: what `Chat(seed)` does in a notebook is what `workload=chat` does."""
    path = Path(mcjax.__file__).parent / "conf" / "workload" / f"{name}.yaml"
    config = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert isinstance(config, dict)
    assert config.pop("_target_") == f"{made.__module__}.{made.__qualname__}"
    assert config.pop("seed") == "${seed}"
    parameters = inspect.signature(made).parameters
    defaults = {
        key: list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
        for key, parameter in parameters.items()
        if key not in ("seed", "path")
    }
    config.pop("path", None)
    assert config == defaults


def test_configs_of_hydra_are_accepted() -> None:
    config = OmegaConf.create({"tenants": {"a": {"share": 1, "system_prompt_tokens": 300}}, "turns": [2, 2]})
    turns = flat(Synthetic(1, sessions=2, tenants=config.tenants, turns=config.turns))
    assert len(turns) == 4
