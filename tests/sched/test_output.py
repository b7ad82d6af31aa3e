"""What a client has of an output: nothing twice, nothing after its end, log probabilities beside their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sched_fixtures import request

from mcjax.sched.output import Output, joined, sampling_of
from mcjax.types import Logprobs, Sampling


class Letters:
    """A text stream of one letter a token, which stops behind `stops`."""

    def __init__(self, *stops: str):
        self.stop: str | None = None
        self._stops = stops
        self._text = ""

    def push(self, tokens: Iterable[int]) -> str:
        self._text += "".join(map(chr, tokens))
        self.stop = next((stop for stop in self._stops if self._text.endswith(stop)), None)
        return "" if self.stop else self._text[-1:]

    def finish(self) -> str:
        return "!"


def output(*stops: str, keeps_tokens: bool = True) -> Output:
    made = Output.of(request(10), 0, keeps_tokens)
    if stops:
        made.text = Letters(*stops)
    return made


def told(made: Output, first: int, values: Sequence[int], logprobs: bool = False) -> bool:
    tokens = np.array(list(values), np.int32)
    ends_ns = np.arange(first, first + len(tokens), dtype=np.int64)
    chosen = -np.arange(first, first + len(tokens), dtype=np.float32)
    wide = np.zeros((len(tokens), 0), np.float32)
    return made.emit(first, tokens, ends_ns, Logprobs(chosen, wide.astype(np.int32), wide) if logprobs else None)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9), st.booleans()), max_size=12))
def test_nothing_is_told_twice_whatever_is_computed_again(pieces: list[tuple[int, int, bool]]) -> None:
    """Log probabilities come with the whole plan, tokens step by step or with it: both end up whole, in order."""
    made = output()
    heard: list[int] = []
    made.listener = lambda tokens, ends_ns: heard.extend(ends_ns.tolist())
    known = 0
    for first, count, logprobs in pieces:
        start = min(first, known if logprobs else made.produced)
        told(made, start, range(start, start + count), logprobs)
        known = max(known, start + count) if logprobs else known
    assert made.tokens == heard == list(range(made.produced))
    found = joined(made.logprobs)
    assert ([] if found is None else found.chosen.tolist()) == [-float(at) for at in range(known)]


def test_counts_suffice_where_ids_do_not_exist() -> None:
    made = output(keeps_tokens=False)
    made.emit(0, None, np.array([5, 6], np.int64))
    made.emit(1, None, np.array([6, 7], np.int64))
    assert made.tokens is None
    assert np.concatenate(made.ends_ns).tolist() == [5, 6, 7]


def test_a_stop_string_ends_an_output_in_mid_plan() -> None:
    made = output("cd")
    said: list[tuple[int, str]] = []
    made.text_listener = lambda index, text: said.append((index, text))
    assert not told(made, 0, b"ab")
    assert told(made, 2, b"cdef", logprobs=True)
    assert (made.tokens, made.finish_reason) == (list(b"abcd"), "stop")
    assert told(made, 6, b"gh"), "what is computed after it is left out"
    assert made.produced == 4
    found = joined(made.logprobs)
    assert found is not None
    assert len(found.chosen) == 2, "as many as there are tokens"
    made.end("length")
    assert made.finish_reason == "stop"
    assert said == [(0, "ab"), (0, "c")]


def test_what_the_text_held_back_comes_with_the_end() -> None:
    made = output("zz")
    said: list[str] = []
    made.text_listener = lambda index, text: said.append(text)
    told(made, 0, b"ab")
    made.end("length")
    assert said == ["ab", "!"]


def test_seeds_of_outputs_are_a_function_of_seed_and_number() -> None:
    sampling = Sampling(temperature=1.0, seed=7, top_k=3)
    seeds = [sampling_of(sampling, index).seed for index in range(1000)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert sampling_of(sampling, 3) == sampling_of(Sampling(temperature=1.0, seed=7, top_k=3), 3)
    assert sampling_of(sampling, 3).top_k == 3
    assert not set(seeds[1:]) & {sampling_of(Sampling(seed=8), index).seed for index in range(1, 1000)}


@pytest.mark.parametrize("streams", [False, True])
def test_somebody_who_listens_wants_each_token(streams: bool) -> None:
    made = output("x") if streams else output()
    assert made.streams is streams
