"""Sampler parameters on their way through plans: what a step knows of the steps before, and what comes back."""

from __future__ import annotations

import numpy as np
import pytest

from mcjax.backends.jax.sampling import MOST_LOGPROBS, MOST_STOPS
from mcjax.backends.progress import decode_progress, encode_progress
from mcjax.engine.base import Kind, Progress, StepItem, StepPlan
from mcjax.types import Sampling

PAGES = list(range(12))
LENGTH = 30
RICH = Sampling(0.8, 5, top_k=50, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7)


def decode_item(lab, output: list[int], sampling: Sampling, pages: list[int], ahead: list[int] | None = None):
    """A decode item after `output`; of it the last is to be fed, `ahead` is known to follow."""
    prompt, known = lab.prompt(1, LENGTH), ahead or []
    start = LENGTH + len(output) - 1
    tokens = np.array([output[-1], *known], np.int32)
    return StepItem(
        7,
        Kind.DECODE,
        start,
        1,
        pages,
        sampling,
        tokens,
        generated=len(output),
        forced=len(known),
        prompt=prompt,
        output=[*output, *known],
    )


async def first(lab, executor, pages: list[int], sampling: Sampling = RICH) -> int:
    prompt = lab.prompt(1, LENGTH)
    item = StepItem(7, Kind.PREFILL, 0, LENGTH, pages, sampling, prompt, prompt=prompt)
    return int((await executor.run(StepPlan([item]), 1)).tokens[0][0])


async def output_of(lab, executor, pages: list[int], sampling: Sampling, steps: int) -> tuple[list[int], Progress]:
    token = await first(lab, executor, pages, sampling)
    progress = await executor.run(StepPlan([decode_item(lab, [token], sampling, pages)]), steps)
    return [token, *progress.tokens[0].tolist()], progress


def test_many_steps_at_once_one_by_one_in_company_and_replayed_are_the_same(lab):
    async def main():
        executor = lab.executor()
        whole, _ = await output_of(lab, executor, PAGES, RICH, 20)
        plain, _ = await output_of(lab, executor, PAGES, Sampling(0.8, 5), 20)

        single = whole[:1]
        for _ in range(20):
            progress = await executor.run(StepPlan([decode_item(lab, single, RICH, PAGES)]), 1)
            single.append(int(progress.tokens[0][0]))

        mate = list(range(20, 30))
        assert await first(lab, executor, mate, Sampling(0.8, 5)) == plain[0]
        both = [decode_item(lab, whole[:1], RICH, PAGES), decode_item(lab, plain[:1], Sampling(0.8, 5), mate)]
        together = await executor.run(StepPlan(both), 20)

        replayed = await executor.run(StepPlan([decode_item(lab, whole[:1], RICH, PAGES, whole[1:9])]), 20)
        return whole, plain, single, [tokens.tolist() for tokens in together.tokens], replayed.tokens[0].tolist()

    whole, plain, single, together, replayed = lab.run(main)
    assert single == whole
    assert together == [whole[1:], plain[1:]]
    assert replayed == whole[1:]
    assert whole != plain


def test_penalties_know_prompt_output_and_what_the_plan_has_produced(lab):
    never = Sampling(frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=1e6)

    async def main():
        executor = lab.executor()
        output, _ = await output_of(lab, executor, PAGES, never, 40)
        free, _ = await output_of(lab, executor, PAGES, Sampling(), 40)
        return output, free

    output, free = lab.run(main)
    seen = set(lab.prompt(1, LENGTH).tolist())
    assert len(set(output)) == len(output), "nothing comes twice"
    assert not seen & set(output), "nor what the prompt held"
    assert len(set(free)) < len(free)


def test_stop_tokens_are_held_back_until_min_tokens_are_there(lab):
    async def main():
        executor = lab.executor()
        free, _ = await output_of(lab, executor, PAGES, Sampling(), 12)
        stop = free[3]
        early = Sampling(stop_tokens=(stop,))
        late = Sampling(stop_tokens=(stop, 3), min_tokens=6)
        token = await first(lab, executor, PAGES, late)
        without = await executor.run(StepPlan([decode_item(lab, [token], late, PAGES)]), 12)
        replay = await executor.run(StepPlan([decode_item(lab, free[:1], late, PAGES, free[1:5])]), 5)
        stopped = await executor.run(StepPlan([decode_item(lab, free[:1], early, PAGES)]), 12)
        return free, stop, without, replay, stopped

    free, stop, without, replay, stopped = lab.run(main)
    assert stopped.finished == (0,)
    assert stopped.tokens[0].tolist() == free[1 : free.index(stop, 1) + 1]
    assert stop not in without.tokens[0].tolist()[:5]
    assert replay.tokens[0].tolist()[:4] == free[1:5], "a known token stands, held back or not"
    assert replay.steps == 5


@pytest.mark.parametrize("asked", [0, 3, MOST_LOGPROBS])
def test_log_probabilities_come_with_the_answer_of_sampled_and_known_tokens(lab, asked):
    sampling = Sampling(1.2, 3, top_k=20, logprobs=asked)

    async def main():
        executor = lab.executor()
        whole, progress = await output_of(lab, executor, PAGES, sampling, 8)
        mate = lab.item(Kind.DECODE, [1], 0, [20, 21, 22, 23, 24, 25])
        items = [mate, decode_item(lab, whole[:1], sampling, PAGES, whole[1:5])]
        return whole, progress, await executor.run(StepPlan(items), 8)

    whole, progress, replayed = lab.run(main)
    told = progress.logprobs[0]
    assert told.chosen.shape == (8,)
    assert told.top_tokens.shape == told.top.shape == (8, asked)
    assert (told.chosen < 0).all()
    assert (np.diff(told.top, axis=1) <= 0).all()
    for step, token in enumerate(whole[1:]):
        at = np.flatnonzero(told.top_tokens[step] == token)
        assert not len(at) or told.top[step, at[0]] == pytest.approx(told.chosen[step], abs=1e-5)
    assert list(replayed.logprobs) == [1]
    np.testing.assert_array_equal(replayed.logprobs[1].chosen, told.chosen)
    np.testing.assert_array_equal(replayed.logprobs[1].top_tokens, told.top_tokens)
    logged = decode_progress(encode_progress(progress)).logprobs[0]
    np.testing.assert_array_equal(logged.chosen, told.chosen)
    assert logged.top.shape[0] == 8


def test_what_the_programs_have_no_room_for_is_refused_by_field(lab):
    stops = tuple(range(MOST_STOPS + 1))

    async def main():
        executor = lab.executor()

        async def attempt(sampling: Sampling) -> Progress:
            return await executor.run(StepPlan([decode_item(lab, [1], sampling, PAGES)]), 1)

        with pytest.raises(ValueError, match=r"logprobs=9, at most 8"):
            await attempt(Sampling(logprobs=MOST_LOGPROBS + 1))
        with pytest.raises(ValueError, match=r"9 stop tokens to hold back, at most 8"):
            await attempt(Sampling(stop_tokens=stops, min_tokens=2))
        await attempt(Sampling(stop_tokens=stops))
        item = decode_item(lab, [1], RICH, PAGES)
        item.prompt = None
        with pytest.raises(ValueError, match="request 7: penalties need prompt and output, got no prompt"):
            await executor.run(StepPlan([item]), 1)
        item = decode_item(lab, [1, 2, 3], RICH, PAGES)
        del item.output[1:]
        with pytest.raises(ValueError, match="got 1 of 3 output tokens"):
            await executor.run(StepPlan([item]), 1)

    lab.run(main)
