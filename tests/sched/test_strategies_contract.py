"""Every strategy that ships fits its protocol, and every config that names one makes it."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from sched_fixtures import columns, decode_columns, request, view

import mcjax.sched
from mcjax.errors import ConfigError
from mcjax.sched.base import Admit, Batch, Expectation, Missing, Recompute, Reject, Replica, Stage
from mcjax.sched.batching.chunked import Chunked
from mcjax.sched.batching.decode_first import DecodeFirst
from mcjax.sched.batching.prefill_first import PrefillFirst
from mcjax.sched.decode.least_loaded import LeastLoaded
from mcjax.sched.fetch.cheapest import Cheapest
from mcjax.sched.tenancy.priority import Priority
from mcjax.sched.view import ClusterView
from mcjax.types import Role, Span, Tier

METHODS = {
    "prefill": "choose",
    "decode": "choose",
    "fetch": "source",
    "admission": "admit",
    "tenancy": "next",
    "batching": "choose",
    "roles": "assign",
}
FOLDER = Path(mcjax.sched.__file__).parent
MODULES = sorted(
    f"{kind}.{path.stem}" for kind in METHODS for path in (FOLDER / kind).glob("*.py") if path.stem != "__init__"
)
CONFIGS = sorted(
    f"{kind}/{entry.name}"
    for kind in METHODS
    for entry in files("mcjax").joinpath("conf", "sched", kind).iterdir()
    if entry.name != "custom.yaml"
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def strategies_in(module: str) -> list[type]:
    loaded = importlib.import_module(f"mcjax.sched.{module}")
    method = METHODS[module.split(".", maxsplit=1)[0]]
    return [
        value
        for value in vars(loaded).values()
        if inspect.isclass(value) and value.__module__ == loaded.__name__ and hasattr(value, method)
    ]


# One random world for all kinds: each strategy is asked twice, afresh, and must answer the same, in range.


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    count, decodes = draw(st.integers(1, 5)), draw(st.integers(1, 4))

    def numbers(length: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(0, high), min_size=length, max_size=length))

    return view(
        [100 * blocks for blocks in numbers(count, 9)],
        [queue / 10 for queue in numbers(count, 20)],
        outgoing_bytes=numbers(count, 10_000),
        decode=decode_columns(numbers(decodes, 30), numbers(decodes, 9_000), numbers(decodes, 9_000)),
        ssd_tokens=[100 * blocks for blocks in numbers(count, 1)] if draw(st.booleans()) else None,
    )


def ask(kind: str, strategy: Any, seen: ClusterView, seed: int) -> Any:
    if kind == "prefill":
        chosen = strategy.choose(request(), seen, rng(seed))
        assert 0 <= chosen.instance < len(seen.names)
        assert chosen.source is None or 0 <= chosen.source < len(seen.names)
        assert 0 <= chosen.reused_tokens <= seen.prompt_tokens
        return chosen
    if kind == "decode":
        chosen = strategy.choose(request(), seen, 5, rng(seed))
        assert 0 <= chosen.instance < len(seen.decode.names)
        assert chosen.expected_tbt_s > 0
        return chosen
    if kind == "fetch":
        replicas = [Replica(node, queue_s + 0.1) for node, queue_s in zip(seen.nodes, seen.queue_s.tolist())]
        replicas += [
            Replica(node, tokens / 100, Tier.SSD) for node, tokens in zip(seen.nodes, seen.ssd_tokens.tolist())
        ]
        answer = strategy.source(Missing(Span((1, 2)), replicas, 0.7, seed - 2, 40 * seed), rng(seed))
        assert answer in replicas or answer is Recompute.RECOMPUTE
        assert strategy.source(Missing(Span((1,)), [], 0.7), rng(seed)) is Recompute.RECOMPUTE, "there is nowhere else"
        return answer
    if kind == "admission":
        answers = [
            strategy.admit(request(), Expectation(ttft_s, tbt_s, 1.0, 0.1), seen, stage, rng(seed))
            for stage in Stage
            for ttft_s, tbt_s in ((0.5, 0.05), (2.0, 0.05), (0.5, 0.2))
        ]
        assert all(isinstance(answer, Admit | Reject) for answer in answers)
        assert all(answer.retry_after_s > 0 and answer.reason for answer in answers if isinstance(answer, Reject))
        return answers
    if kind == "tenancy":
        waiting = [request(request_id=index, priority=int(queue * 10) % 3) for index, queue in enumerate(seen.queue_s)]
        chosen = strategy.next(waiting)
        assert 0 <= chosen < len(waiting)
        strategy.charge(waiting[chosen], 100)
        return chosen, [strategy.classify(one) for one in waiting]
    if kind == "batching":
        waiting = [tokens + 1 for tokens in seen.prefix_tokens.tolist()]
        return [
            check_batch(strategy, waiting[:few], decoding, 64) for few in (0, 1, len(waiting)) for decoding in (0, 7)
        ]
    return [strategy.assign("p0", role, seen) for role in Role]


def check_batch(strategy: Any, waiting: list[int], decoding: int, limit: int) -> Batch:
    """Something is done whenever there is something to do, and no chunk is longer than its prompt or the executor."""
    batch = strategy.choose(waiting, decoding, limit)
    assert batch.chunks or batch.decode or not (waiting or decoding)
    assert not batch.decode or decoding
    assert all(1 <= tokens <= min(limit, waiting[index]) for index, tokens in batch.chunks)
    return batch


@pytest.mark.parametrize("module", MODULES)
def test_every_file_holds_one_documented_strategy(module: str) -> None:
    found = strategies_in(module)
    assert len(found) == 1, f"{module} holds {[one.__name__ for one in found]}"
    assert (found[0].__doc__ or "").strip()
    assert importlib.import_module(f"mcjax.sched.{module}").__doc__


@pytest.mark.parametrize("module", MODULES)
@settings(max_examples=25)
@given(seen=views(), seed=st.integers(0, 5))
def test_every_strategy_answers_in_range_and_the_same_again(module: str, seen: ClusterView, seed: int) -> None:
    strategy = strategies_in(module)[0]()
    again = copy.deepcopy(strategy)
    before = columns(seen)
    answer = ask(module.split(".", maxsplit=1)[0], strategy, seen, seed)
    assert columns(seen) == before, "a view is read, never written"
    assert ask(module.split(".", maxsplit=1)[0], again, seen, seed) == answer


@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_makes_its_strategy_with_the_defaults_of_the_code(config: str) -> None:
    kind, name = config.split("/")
    section = OmegaConf.load(str(files("mcjax").joinpath("conf", "sched", kind, name)))
    made = instantiate(section)
    assert hasattr(made, METHODS[kind])
    assert type(made) in strategies_in(f"{kind}.{type(made).__module__.rsplit('.', 1)[1]}")
    assert vars(made) == vars(type(made)()), "config and code must not disagree on a default"


def test_every_strategy_has_a_config() -> None:
    made = [instantiate(OmegaConf.load(str(files("mcjax").joinpath("conf", "sched", config)))) for config in CONFIGS]
    named = sorted(type(one).__module__.removeprefix("mcjax.sched.") for one in made)
    assert named == MODULES


# The few whose answer can be said in a line


def test_decode_goes_where_the_step_is_shortest_among_those_with_room() -> None:
    """1,010 tokens are needed. d0 has the shortest step and no room; d2's step is shorter than d1's."""
    decode = decode_columns([0, 5, 2], [0, 4000, 3000], [1009, 9000, 9000])
    assert LeastLoaded().choose(request(1000), view([0], decode=decode), 0, rng()).instance == 2
    expected = LeastLoaded().choose(request(1000), view([0], decode=decode), 0, rng()).expected_tbt_s
    assert expected == pytest.approx(1e-3 + 3e-6 + 4000e-6)


def test_decode_without_room_anywhere_goes_where_most_is() -> None:
    decode = decode_columns([0, 5, 2], [0, 4000, 3000], [10, 30, 20])
    assert LeastLoaded().choose(request(1000), view([0], decode=decode), 0, rng()).instance == 1


def test_cheapest_takes_the_first_of_equal_replicas_and_computes_when_that_is_quicker() -> None:
    replicas = [Replica("a", 0.3), Replica("b", 0.2), Replica("c", 0.2)]
    assert Cheapest().source(Missing(Span((1,)), replicas, 1.0), rng()) == Replica("b", 0.2)
    assert Cheapest().source(Missing(Span((1,)), replicas, 0.2), rng()) is Recompute.RECOMPUTE


def test_priority_is_strict_and_fair_among_equals() -> None:
    waiting = [request(request_id=index, priority=priority) for index, priority in enumerate([0, 2, 1, 2])]
    assert Priority().next(waiting) == 1


def test_prefill_first_and_chunked_differ_in_whether_decodes_wait() -> None:
    assert PrefillFirst().choose([100, 5], 3, 64) == Batch(((0, 64),), decode=False)
    assert Chunked(32).choose([100, 5], 3, 64) == Batch(((0, 29),), decode=True)
    assert Chunked(32).choose([10, 5, 40, 8], 3, 64) == Batch(((0, 10), (1, 5), (2, 14)), decode=True)
    assert Chunked(32).choose([70, 5], 0, 16) == Batch(((0, 16), (1, 5)), decode=False)
    assert Chunked(32).choose([100], 99, 64) == Batch(((0, 1),), decode=True), "a full batch cannot starve a prompt"


def test_decode_first_keeps_prompts_waiting_within_a_bound() -> None:
    strategy = DecodeFirst(patience_steps=3, least_batch=2)
    decode, chunk = Batch((), decode=True), Batch(((0, 64),), decode=False)
    assert [strategy.choose([100, 5], 2, 64) for _ in range(9)] == [decode] * 3 + [chunk] + [decode] * 3 + [
        chunk,
        decode,
    ]
    assert strategy.choose([100, 5], 1, 64) == chunk, "the batch has room"
    assert strategy.choose([100, 5], 0, 64) == chunk
    assert [strategy.choose([100], 2, 64) for _ in range(4)] == [decode] * 3 + [chunk], (
        "who joins starts the count anew"
    )


@given(st.lists(st.integers(1, 99), min_size=1, max_size=6), st.integers(0, 40), st.integers(1, 64), st.integers(1, 80))
def test_a_token_budget_is_kept_and_used(waiting: list[int], decoding: int, chunk: int, budget: int) -> None:
    batch = Chunked(budget).choose(waiting, decoding, chunk)
    used = sum(tokens for _, tokens in batch.chunks)
    assert [index for index, _ in batch.chunks] == list(range(len(batch.chunks)))
    assert all(1 <= tokens <= min(chunk, waiting[index]) for index, tokens in batch.chunks)
    assert used + decoding <= max(budget, decoding + 1)
    assert used == min(max(1, budget - decoding), sum(min(tokens, chunk) for tokens in waiting))


@pytest.mark.parametrize(
    "make", [lambda: Chunked(0), lambda: Chunked(-3), lambda: DecodeFirst(0), lambda: DecodeFirst(1, 0)]
)
def test_a_value_that_cannot_work_is_refused_by_name(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"sched\.batching\.(token_budget|patience_steps|least_batch)"):
        make()


def test_early_rejection_takes_what_just_fits() -> None:
    from mcjax.sched.admission.early_rejection import EarlyRejection

    def admit(ttft_s: float, tbt_s: float, stage: Stage, slack: float = 1.0) -> Admit | Reject:
        return EarlyRejection(slack).admit(request(), Expectation(ttft_s, tbt_s, 1.0, 0.1), view([0]), stage, rng())

    assert admit(1.0, 0.1, Stage.ARRIVAL) == Admit()
    refused = admit(1.5, 0.1, Stage.ARRIVAL)
    assert isinstance(refused, Reject)
    assert math.isclose(refused.retry_after_s, 0.5)
    assert admit(1.5, 0.1, Stage.DECODE) == Admit(), "the first token is there by then"
    assert isinstance(admit(0.1, 0.11, Stage.DECODE), Reject)
    assert admit(1.5, 0.15, Stage.ARRIVAL, slack=2.0) == Admit()
