"""The full sampler against a reference of its own (`sampling_reference`), and against the plain one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import Asked, distribution, logprobs, passing, penalised

from mcjax.backends.jax.sampler_input import Part, full_rows, plain_rows
from mcjax.backends.jax.sampling import MOST_LOGPROBS, sample, sample_fully
from mcjax.engine.base import Kind, StepItem
from mcjax.types import Logprobs, Sampling

HISTORY = 24
WIDE = 2048
full, plain = jax.jit(sample_fully), jax.jit(sample)


def draw(
    logits: np.ndarray, rows: list[Asked], known: dict[int, int] | None = None, position: int = 5
) -> tuple[list[int], list[Logprobs | None]]:
    """A token and its log probabilities a row; rows beyond are padding, as in the executor."""
    parts, items = [], []
    for index, asked in enumerate(rows):
        item = StepItem(index, Kind.DECODE, position - 1, 1, [], asked.sampling, generated=len(asked.output))
        item.prompt, item.output = np.array(asked.prompt, np.int32), asked.output
        ahead = [known[index]] if known and index in known else []
        items.append(item)
        parts.append(Part(asked.sampling, True, item.generated, ahead))
    words, numbers = full_rows(items, parts, len(logits), HISTORY)
    answers = np.asarray(full(jnp.asarray(logits, jnp.float32), words, numbers))
    for part, answer in zip(parts, answers, strict=False):
        assert answer[1] == 1
        part.take(int(answer[0]))
        part.logprobs.append(answer[2:])
    return [part.output[0] for part in parts], [part.told() for part in parts]


def noise(seed: int, position: int, vocabulary: int) -> np.ndarray:
    words = jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)
    key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)
    return np.asarray(jax.random.gumbel(key, (vocabulary,)), np.float64)


PENALTY = st.floats(-2, 2, width=32)


@st.composite
def askings(draws: st.DrawFn, vocabulary: int) -> Asked:
    ids = st.integers(0, vocabulary - 1)
    sampling = Sampling(
        temperature=draws(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        seed=draws(st.integers(0, 2**40)),
        stop_tokens=tuple(draws(st.lists(ids, max_size=3, unique=True))),
        min_tokens=draws(st.integers(0, 4)),
        top_k=draws(st.integers(0, vocabulary + 2)),
        top_p=draws(st.sampled_from([1.0]) | st.floats(0.0078125, 1, width=32)),
        min_p=draws(st.sampled_from([0.0]) | st.floats(0, 1, width=32)),
        repetition_penalty=draws(st.sampled_from([1.0]) | st.floats(0.25, 4, width=32)),
        presence_penalty=draws(st.just(0.0) | PENALTY),
        frequency_penalty=draws(st.just(0.0) | PENALTY),
        logprobs=draws(st.none() | st.integers(0, MOST_LOGPROBS)),
    )
    prompt = draws(st.lists(ids, max_size=12))
    return Asked(sampling, prompt, draws(st.lists(ids, max_size=6)))


@settings(max_examples=300)
@given(data=st.data())
def test_any_parameters_in_any_company_give_what_the_reference_gives(data: st.DataObject) -> None:
    rows = [data.draw(askings(20), label=f"row {index}") for index in range(data.draw(st.integers(1, 4)))]
    logits = np.random.default_rng(data.draw(st.integers(0, 999))).normal(size=(4, 20)).astype(np.float32) * 3
    if data.draw(st.booleans()):
        logits = logits.round()  # equals, and zeros of both signs
    tokens, told = draw(logits, rows)
    for row, (asked, token, found) in enumerate(zip(rows, tokens, told, strict=True)):
        check(logits[row], asked, token)
        check_told(logits[row], asked, token, found)


def check(logits: np.ndarray, asked: Asked, token: int) -> None:
    """The token is the best of those that pass, as near as float32 can tell."""
    scores = penalised(logits, asked)
    if asked.sampling.temperature == 0:
        assert scores[token] >= scores.max() - 1e-4
        return
    noisy = scores / asked.sampling.temperature + noise(asked.sampling.seed, 5, len(logits))
    assert passing(logits, asked, slack=1e-4)[token]
    assert noisy[token] >= noisy[passing(logits, asked, slack=-1e-4)].max(initial=-np.inf) - 1e-3


def check_told(logits: np.ndarray, asked: Asked, token: int, found: Logprobs | None) -> None:
    if asked.sampling.logprobs is None:
        assert found is None
        return
    assert found is not None
    want = logprobs(logits)
    assert found.chosen.tolist() == pytest.approx([want[token]], abs=1e-4)
    best = np.argsort(-logits, kind="stable")[: asked.sampling.logprobs]
    np.testing.assert_allclose(found.top[0], want[best], atol=1e-4)
    np.testing.assert_array_equal(want[found.top_tokens[0]], want[best])  # among equals any will do
    assert len(set(found.top_tokens[0].tolist())) == len(best)


ONE_BY_ONE: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.4},
    "repetition": {"repetition_penalty": 3.0},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "held stops": {"stop_tokens": (0, 1), "min_tokens": 9},
    "all": {"top_k": 4, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
}
LOGITS = np.log(np.array([0.28, 0.22, 0.16, 0.12, 0.10, 0.07, 0.05], np.float32)) + 2


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_frequencies_follow_the_filtered_softmax(name: str) -> None:
    asked = Asked(Sampling(**{"temperature": 1.0, **ONE_BY_ONE[name]}), [0, 2, 2], [0, 0, 1])
    count = 8000
    rows = [replace(asked, sampling=replace(asked.sampling, seed=seed)) for seed in range(count)]
    tokens, _ = draw(np.broadcast_to(LOGITS, (count, 7)), rows)
    drawn = np.bincount(tokens, minlength=7) / count
    want = distribution(LOGITS, asked)
    assert (drawn[want == 0] == 0).all()
    # Five standard deviations of a share of a half: 5 * sqrt(0.25 / 8000) = 0.028.
    np.testing.assert_allclose(drawn, want, atol=0.03)
    plainly = distribution(LOGITS, Asked(Sampling(temperature=1.0)))
    assert np.abs(want - plainly).max() > 0.06, "the case must be able to fail"


RICH = [
    Asked(Sampling(1.0, 11, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2, logprobs=4), [1, 2, 3], [4, 5]),
    Asked(Sampling(0.7, 12, top_p=0.8, presence_penalty=0.5, frequency_penalty=0.5), [9] * 5, [8, 8]),
    Asked(Sampling(0.0, 13, stop_tokens=(3,), min_tokens=5, logprobs=0), [1], [2]),
    Asked(Sampling(1.5, 14, top_k=1000)),
    Asked(Sampling(1.5, 2**63 + 5)),
    Asked(Sampling()),
    Asked(Sampling(1.0, 15, repetition_penalty=1.3), list(range(20)), [7]),
]


def wide(rows: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(rows, WIDE)).astype(np.float32) * 3


@pytest.mark.parametrize("alone", range(len(RICH)))
def test_a_row_is_the_same_to_the_bit_alone_and_in_company(alone: int) -> None:
    logits = wide(len(RICH))
    together = answers(logits, RICH)
    quiet = [Asked(Sampling()) for _ in RICH]
    quiet[alone] = RICH[alone]
    np.testing.assert_array_equal(answers(logits, quiet)[alone], together[alone])
    turned = np.roll(np.arange(len(RICH)), 3)  # in another place, too
    moved = answers(logits[turned], [RICH[index] for index in turned])
    np.testing.assert_array_equal(moved[int(np.argmax(turned == alone))], together[alone])


def answers(logits: np.ndarray, rows: list[Asked]) -> np.ndarray:
    """`[B, ...]`: whole answers, without the log probabilities that nobody asked for."""
    items = [StepItem(0, Kind.DECODE, 4, 1, [], asked.sampling, generated=len(asked.output)) for asked in rows]
    for item, asked in zip(items, rows, strict=True):
        item.prompt, item.output = np.array(asked.prompt, np.int32), asked.output
    parts = [Part(asked.sampling, True, len(asked.output), []) for asked in rows]
    found = np.array(full(logits, *full_rows(items, parts, len(rows), HISTORY)))
    found[[asked.sampling.logprobs is None for asked in rows], 2:] = 0
    return found


def test_a_plain_row_gets_the_same_token_from_both_programs() -> None:
    rows, differ = 64, 0
    for trial in range(40):
        logits = np.random.default_rng(trial).normal(size=(rows, WIDE)).astype(np.float32) * 2
        asked = [Sampling(0.1 * (seed % 20), seed * 977 + trial) for seed in range(rows)]
        items = [StepItem(0, Kind.DECODE, trial, 1, [], sampling) for sampling in asked]
        plainly = np.asarray(plain(logits, *plain_rows(items, rows)))
        mate = StepItem(0, Kind.DECODE, trial, 1, [], replace(asked[0], top_k=5, logprobs=1, repetition_penalty=1.1))
        mate.prompt = np.array([1, 2], np.int32)
        parts = [Part(item.sampling, True, 0, []) for item in (mate, *items[1:])]
        fully = np.asarray(full(logits, *full_rows([mate, *items[1:]], parts, rows, HISTORY)))
        np.testing.assert_array_equal(fully[1:, :2], plainly[1:])
        differ += len(np.unique(plainly[:, 0]))
    assert differ > 20 * 40, "the rows must be able to differ"


def test_a_known_token_stands_and_has_its_own_log_probability() -> None:
    asked = Asked(Sampling(0.9, 4, logprobs=2, top_k=1))
    (token,), (told,) = draw(LOGITS[None], [asked], known={0: 5})
    assert token == 5
    assert told is not None
    assert told.chosen.tolist() == pytest.approx([np.log(0.05 + 0.02)], abs=1e-5)
    assert told.top_tokens.tolist() == [[0, 1]]


def test_broken_rows_say_so_and_only_they() -> None:
    logits = wide(3)
    logits[1, 7] = np.nan
    items = [StepItem(0, Kind.DECODE, 4, 1, [], Sampling(1.0, 3, top_p=0.9, logprobs=1)) for _ in range(3)]
    parts = [Part(item.sampling, True, 0, []) for item in items]
    found = np.asarray(full(logits, *full_rows(items, parts, 3, HISTORY)))
    assert found[:, 1].tolist() == [1, 0, 1]
    assert (found[:, 0] < WIDE).all()
