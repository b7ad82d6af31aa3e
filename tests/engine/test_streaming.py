"""Tokens, text and log probabilities as they come; outputs that end with a stop token, a stop string, or at a limit."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
from engine_fixtures import MS, CheckBench, expected, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax import aio
from mcjax.backends.check.digests import VOCAB, logprob
from mcjax.engine.cluster_spec import InstanceSpec
from mcjax.engine.sequence import STOP_STRING_STEPS
from mcjax.engine.service import Service
from mcjax.errors import ConfigError
from mcjax.types import ChatMessage, RequestRow, RequestState, Sampling
from mcjax.workload.synthetic import Synthetic

PROMPT = list(range(1, 23))
LONG = 40


class Numbers:
    """Writes each token as `<17>`."""

    vocab_size = VOCAB
    end_tokens = ()

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text[1:-1].split("><")]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(f"<{token}>" for token in tokens)

    def token_bytes(self, token: int) -> bytes:
        return f"<{token}>".encode()

    def apply_chat_template(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> list[int]:
        raise NotImplementedError


@functools.cache
def whole(cluster: str) -> list[int]:
    """The output without any stop."""
    bench = CheckBench(cluster)
    return expected(bench.request(1, PROMPT, LONG, LONG), LONG)


def play(cluster: str, sampling: Sampling, max_steps: int | None = None) -> tuple[RequestRow, CheckBench, list[str]]:
    bench = CheckBench(cluster, max_steps=max_steps, tokenizer=Numbers)
    rows: list[RequestRow] = []
    said: list[str] = []

    async def main(service: Service) -> None:
        asked = bench.request(1, PROMPT, LONG, LONG, sampling=sampling)
        beside = service.frontend.submit(bench.request(2, PROMPT[:7], 8))
        ticket = service.frontend.submit(asked, text_listener=lambda index, text: said.append(text))
        rows.append(await ticket.task)
        other = await beside.task
        assert other.output == expected(other.request, 8)

    bench.run(main)
    return rows[0], bench, said


@pytest.mark.parametrize("cluster", ["1p1d", "1m"])
@pytest.mark.parametrize("max_steps", [None, 1])
@pytest.mark.parametrize("length", [1, 2, 7, 20])
def test_a_stop_string_across_token_borders_ends_the_output(cluster: str, max_steps: int | None, length: int) -> None:
    """Also with the prompt's own token (the first)."""
    tokens = whole(cluster)[:length]
    stop = "".join(f"<{token}>" for token in tokens[-2:])[1:]
    row, bench, said = play(cluster, Sampling(stop_strings=(stop, "never")), max_steps)
    assert (row.state, row.finish_reason) == (RequestState.COMPLETED, "stop")
    assert row.output == tokens
    assert row.output_tokens == length == sum(map(len, row.token_ends_ns))
    assert "".join(said) == Numbers().decode(tokens).removesuffix(stop)
    assert row.finish_ns == int(row.token_ends_ns[-1][-1]), "not the end of the macro-step"
    steps = [
        dict(event[4:])["tokens"] // dict(event[4:])["blocks"]
        for event in bench.rows.events
        if event[1] == "decode_step"
    ]
    assert max(steps, default=0) <= STOP_STRING_STEPS


def test_no_stop_string_ends_it_before_its_min_tokens() -> None:
    tokens = whole("1p1d")
    stop = f"<{tokens[3]}>"
    again = next((at for at in range(10, LONG) if tokens[at] == tokens[3]), None)
    row, _, said = play("1p1d", Sampling(stop_strings=(stop,), min_tokens=10))
    assert row.output == tokens[: LONG if again is None else again + 1]
    assert row.finish_reason == ("length" if again is None else "stop") or row.finish_reason == "stop"
    assert "".join(said).startswith("".join(f"<{token}>" for token in tokens[:10]))


@pytest.mark.parametrize("cluster", ["1p1d", "1m"])
@pytest.mark.parametrize("length", [1, 5])
def test_why_an_output_ended(cluster: str, length: int) -> None:
    tokens = whole(cluster)[:length]
    row, _, _ = play(cluster, Sampling(stop_tokens=(tokens[-1],)))
    assert (row.output, row.finish_reason) == (tokens, "stop")
    bench = CheckBench(cluster)

    async def main(service: Service) -> None:
        row = await service.frontend.submit(bench.request(1, PROMPT, LONG, length)).task
        assert (row.output, row.finish_reason) == (tokens, "length")

    bench.run(main)


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    bench = CheckBench("1p1d")

    async def main(service: Service) -> None:
        asked = bench.request(1, PROMPT, LONG, sampling=Sampling(stop_strings=("x",)))
        with pytest.raises(ConfigError, match=r"sampling\.stop_strings=.*needs a tokenizer"):
            service.frontend.submit(asked)
        with pytest.raises(ConfigError, match="needs a tokenizer"):
            service.frontend.submit(bench.request(2, PROMPT, LONG), text_listener=lambda index, text: None)
        assert not service.frontend.submitted

    bench.run(main)


@pytest.mark.parametrize("cluster", ["1p1d", "1m"])
def test_who_listens_hears_each_token_as_its_step_ends(cluster: str) -> None:
    """In mid macro-step, with the times that the row has afterwards."""
    bench = CheckBench(cluster)

    async def main(service: Service) -> None:
        heard: list[tuple[int, int, int]] = []

        def listen(tokens: object, ends_ns: np.ndarray) -> None:
            assert isinstance(tokens, np.ndarray)
            heard.extend((aio.now_ns(), int(end), int(token)) for end, token in zip(ends_ns, tokens, strict=True))

        row = await service.frontend.submit(bench.request(1, PROMPT, LONG, LONG), listen).task
        assert [token for _, _, token in heard] == row.output == whole(cluster)
        assert [end for _, end, _ in heard] == np.concatenate(row.token_ends_ns).tolist()
        assert all(now == end for now, end, _ in heard)

    bench.run(main)
    steps = [event for event in bench.rows.events if event[1] == "decode_step"]
    assert len(steps) < LONG // 4, "macro-steps are as long as ever"


def test_listening_changes_nothing_in_the_simulated_world() -> None:
    def traffic() -> Synthetic:
        return Synthetic(seed=3, sessions=12, turns=(1, 2), output_tokens=(1, 60), max_tokens=64, rate_per_s=8.0)

    heard: list[tuple[int, int]] = []

    def listen(tokens: object, ends_ns: np.ndarray) -> None:
        heard.extend((aio.now_ns(), int(end)) for end in ends_ns)

    quiet, listened = simulate(traffic(), "1p1d"), simulate(traffic(), "1p1d", listener=listen)
    ends = [
        sorted((row.request.request_id, np.concatenate(row.token_ends_ns).tolist()) for row in rows.requests)
        for rows in (quiet, listened)
    ]
    assert ends[0] == ends[1]
    assert quiet.decided() == listened.decided()
    assert len(heard) == sum(row.output_tokens for row in listened.requests)
    assert all(now == end for now, end in heard)


@pytest.mark.parametrize("cluster", ["1p1d", "1m"])
@settings(max_examples=10)
@given(after_ms=st.integers(5, 60), listens=st.booleans(), seed=st.integers(0, 3))
def test_log_probabilities_survive_a_loss(cluster: str, after_ms: int, listens: bool, seed: int) -> None:
    """One a token, whoever died: those of tokens that were told of, but whose plan was lost, come with the replay."""
    bench = CheckBench(cluster, seed=seed)

    async def main(service: Service) -> None:
        victim = "m0" if cluster == "1m" else "d0"
        spec = InstanceSpec(f"{victim}b", service.cluster.instances[victim].role)
        aio.clock().call_at_ns(after_ms * MS, service.cluster.kill, victim)
        aio.clock().call_at_ns(after_ms * MS + MS, service.cluster.join, spec)
        asked = bench.request(1, PROMPT, LONG, LONG, sampling=Sampling(logprobs=2, temperature=0.7, seed=11))
        row = await service.frontend.submit(asked, (lambda tokens, ends_ns: None) if listens else None).task
        assert row.output == expected(asked, LONG)
        assert row.logprobs is not None
        assert row.output is not None
        right = [logprob(token, at) for at, token in enumerate(row.output, len(PROMPT))]
        assert row.logprobs.chosen.tolist() == np.array(right, np.float32).tolist()
        assert row.logprobs.top.shape == row.logprobs.top_tokens.shape == (LONG, 2)

    bench.run(main)


@pytest.mark.parametrize("cluster", ["1p1d", "1m"])
def test_a_sampler_that_penalises_is_told_what_there_has_been(cluster: str) -> None:
    bench = CheckBench(cluster, max_steps=3)
    seen: list[tuple[int, list[int]]] = []

    async def main(service: Service) -> None:
        for executor in bench.world.executors.values():
            run = executor.run

            async def spied(plan, max_steps, on_step=None, run=run):
                for item in plan.items:
                    assert (item.prompt is not None) == (item.request_id == 1)
                    if item.request_id == 1:
                        seen.append((item.generated, list(item.output)))
                return await run(plan, max_steps, on_step)

            executor.run = spied  # pyright: ignore[reportAttributeAccessIssue]
        asked = bench.request(1, PROMPT, 12, sampling=Sampling(presence_penalty=0.5))
        tickets = [service.frontend.submit(asked), service.frontend.submit(bench.request(2, PROMPT[:9], 12))]
        for ticket in tickets:
            await ticket.task

    bench.run(main)
    right = whole(cluster)
    assert all(output == right[:generated] for generated, output in seen)
    assert max(generated for generated, _ in seen) > 6
