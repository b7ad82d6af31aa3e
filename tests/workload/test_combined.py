"""Workloads made of workloads: superposition, slices, other block sizes; and their way through Hydra."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.app.build import workload_of
from mcjax.app.compose import compose
from mcjax.errors import ConfigError
from mcjax.types import NS_PER_S, Request, Script
from mcjax.workload.base import Turn, Workload
from mcjax.workload.mooncake import Mooncake
from mcjax.workload.reblocked import Reblocked
from mcjax.workload.replay import OneTurn
from mcjax.workload.slice import Slice
from mcjax.workload.superposed import Superposed
from mcjax.workload.synthetic import Synthetic


class Prompts:
    """A workload of prompts named by `ids`, one a second."""

    name = "prompts"

    def __init__(self, *prompts: tuple[int, tuple[int, ...]], block_tokens: int = 4):
        self.block_tokens: int | None = block_tokens
        self._prompts = prompts

    def sessions(self) -> Iterator[OneTurn]:
        for index, (length, ids) in enumerate(self._prompts):
            size = self.block_tokens or 0
            request = Request(index, index * NS_PER_S, length, 9, trace_ids=ids, trace_block_tokens=size)
            yield OneTurn(Turn(request, Script(1)))

    def inputs(self) -> dict[str, str]:
        return {"f": "00"}


def requests_of(workload: Workload) -> list[Request]:
    """Every turn of every session, by the scripts."""
    found: list[Request] = []
    for session in workload.sessions():
        turn = session.next_turn(None)
        assert turn is not None
        assert turn.request.arrival_ns == session.start_ns
        while turn is not None:
            found.append(turn.request)
            turn = session.next_turn(None)
    return found


def test_parts_play_as_they_would_alone_and_never_meet() -> None:
    one, two = Prompts((8, (0, 1)), (8, (0, 2))), Prompts((4, (0,)), (4, (0,)), (4, (1,)))
    both = requests_of(Superposed({"one": one, "two": two}))
    assert [request.arrival_ns // NS_PER_S for request in both] == [0, 0, 1, 1, 2]
    assert [request.session.split("/")[0] for request in both] == ["one", "two", "one", "two", "two"]
    assert [request.request_id for request in both] == [0, 1, 2, 3, 5]
    assert [request.trace_ids for request in both] == [(0, 2), (1,), (0, 4), (1,), (3,)]
    assert {request.tenant for request in both} == {"default"}
    named = requests_of(Superposed({"one": one, "two": two}, tenant_by_part=True))
    assert [request.tenant for request in named] == ["one", "two", "one", "two", "two"]
    assert Superposed({"one": one}).inputs() == {"f": "00"}


def test_parts_have_seeds_of_their_own() -> None:
    def starts(parts: dict[str, Synthetic], seed: int) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {name: [] for name in parts}
        for request in requests_of(Superposed(parts, seed=seed)):
            if request.turn == 0:
                found[request.session.split("/")[0]].append(request.arrival_ns)
        return found

    equal = {"a": Synthetic(0, sessions=9), "b": Synthetic(0, sessions=9)}
    both = starts(equal, 5)
    assert both["a"] != both["b"]
    assert both == starts(equal, 5)
    assert both["a"] == starts({"a": Synthetic(3, sessions=9)}, 5)["a"], "a part does not depend on the others"
    assert both["a"] != starts(equal, 6)["a"]


def test_turns_of_a_part_know_their_parents() -> None:
    requests = requests_of(Superposed({"a": Synthetic(0, sessions=20), "b": Synthetic(0, sessions=20)}, seed=1))
    ids = {request.request_id for request in requests}
    assert len(ids) == len(requests)
    assert all((request.parent in ids) == (request.turn > 0) for request in requests)


def test_superposed_refuses_what_cannot_be_added() -> None:
    with pytest.raises(ConfigError, match=r"workload\.parts"):
        Superposed({})
    with pytest.raises(ConfigError, match=r"workload\.parts\.a"):
        Superposed({"a": {"path": "x"}})
    with pytest.raises(ConfigError, match=r"workload\.parts\.a=9223372036854775807: block ids"):
        requests_of(Superposed({"a": Prompts((4, (2**63 - 1,))), "b": Prompts((4, (0,)))}))
    with pytest.raises(ConfigError, match="different block sizes"):
        Superposed({"a": Prompts((4, (0,))), "b": Prompts((4, (0,)), block_tokens=8)})


TEN = Prompts(*[(4, (index,)) for index in range(10)])


@pytest.mark.parametrize(
    ("settings_", "ids", "starts_s"),
    [
        ({}, range(10), range(10)),
        ({"start_s": 2, "end_s": 5}, [2, 3, 4], [0, 1, 2]),
        ({"start_s": 1.5, "limit": 2}, [2, 3], [0.5, 1.5]),
        ({"slices": 3, "index": 1, "end_s": 9}, [3, 4, 5], [0, 1, 2]),
        ({"start_s": 8, "rate_scale": 2}, [8, 9], [0, 0.5]),
        ({"start_s": 8, "rate_scale": 2, "delay_s": 3}, [8, 9], [3, 3.5]),
    ],
)
def test_slices(settings_: dict[str, Any], ids: list[int], starts_s: list[float]) -> None:
    found = requests_of(Slice(TEN, **settings_))
    assert [request.request_id for request in found] == list(ids)
    assert [request.arrival_ns / NS_PER_S for request in found] == list(starts_s)


@given(st.integers(1, 7), st.floats(0, 8), st.none() | st.floats(9, 12))
@settings(max_examples=60)
def test_slices_part_a_stretch_without_gap_or_overlap(count: int, start_s: float, end_s: float | None) -> None:
    whole = [request.request_id for request in requests_of(Slice(TEN, start_s, end_s))]
    parts: list[int] = []
    for index in range(count):
        try:
            parts += [request.request_id for request in requests_of(Slice(TEN, start_s, end_s, count, index))]
        except ConfigError:
            continue  # nothing starts there
    assert parts == whole


def test_a_slice_knows_its_requests_where_each_session_is_one(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 1000 * i, "input_length": 512, "output_length": 1, "hash_ids": [i]} for i in range(10)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = Mooncake(str(trace))
    for part in (Slice(whole), Slice(whole, slices=3, index=1), Slice(whole, limit=2)):
        assert part.total_requests == len(requests_of(part))
    assert Slice(whole, end_s=5).total_requests is None, "how many sessions there are is not known"
    assert Slice(Synthetic(1, sessions=20, turns=3)).total_requests is None


def test_a_sliced_session_plays_to_its_end_and_is_reseeded() -> None:
    whole = Synthetic(1, sessions=20, turns=3)
    part = Slice(whole, start_s=3)
    found = requests_of(part)
    assert len(found) % 3 == 0
    assert [r.request_id for r in found] == [r.request_id for r in requests_of(whole)][-len(found) :]
    assert requests_of(part.reseeded(2))[0].arrival_ns != found[0].arrival_ns


@pytest.mark.parametrize(
    "settings_",
    [
        {"start_s": 99},
        {"end_s": 0},
        {"index": 1},
        {"slices": 0},
        {"rate_scale": 0},
        {"limit": 0},
        {"delay_s": -1},
        {"of": 3},
    ],
)
def test_slices_that_cannot_be_cut(settings_: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"workload.{next(iter(settings_))}"):
        Slice(**{"of": TEN, **settings_})


def test_larger_blocks_are_exact_and_smaller_ones_a_lower_bound() -> None:
    prompts = Prompts((16, (0, 1, 2, 3)), (14, (0, 1, 2, 4)), (9, (0, 1, 5)))
    large = [request.trace_ids for request in requests_of(Reblocked(prompts, 8))]
    assert large == [(1, 3), (1, 4), (1, 5)]
    small = [request.trace_ids for request in requests_of(Reblocked(prompts, 2))]
    assert small[1] == (0, 1, 2, 3, 4, 5, 8)
    assert small[2] == (0, 1, 2, 3, 10)
    assert [request.trace_block_tokens for request in requests_of(Reblocked(prompts, 8))] == [8] * 3
    assert [r.prompt_tokens for r in requests_of(Reblocked(prompts))] == [16, 14, 9]
    assert [r.prompt_tokens for r in requests_of(Reblocked(prompts, count_partial=True))] == [16, 16, 12]
    for size in (6, 3, 0):
        with pytest.raises(ConfigError, match=r"workload\.block_tokens"):
            Reblocked(prompts, size)


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=2, max_size=5),
    st.sampled_from([1, 2, 8, 12]),
)
@settings(max_examples=100)
def test_reblocked_ids_share_what_the_tokens_share(texts: list[list[int]], size: int) -> None:
    """Blocks of 4 tokens named by the prefix they end; the new ids must agree exactly where the new blocks would."""
    names: dict[tuple[int, ...], int] = {}

    def ids(text: list[int], block: int) -> tuple[int, ...]:
        return tuple(names.setdefault(tuple(text[: end + block]), len(names)) for end in range(0, len(text), block))

    found = requests_of(Reblocked(Prompts(*[(len(text), ids(text, 4)) for text in texts]), size))
    for text, request in zip(texts, found, strict=True):
        assert request.trace_ids is not None
        assert len(request.trace_ids) == -(-len(text) // size)
        for other, second in zip(texts, found, strict=True):
            assert second.trace_ids is not None
            for position, (a, b) in enumerate(zip(request.trace_ids, second.trace_ids, strict=False)):
                end = min((position + 1) * size, len(text), len(other))
                if a == b:
                    assert text[:end] == other[:end]
                elif size >= 4 and (position + 1) * size == end:
                    assert text[:end] != other[:end], "whole large blocks of equal content must be shared"


def test_tokens_pass_unchanged() -> None:
    before = requests_of(Synthetic(1, sessions=3))
    after = requests_of(Reblocked(Synthetic(1, sessions=3), 64))
    assert [r.tokens is not None for r in after] == [True] * len(before)
    assert [r.prompt_tokens for r in after] == [r.prompt_tokens for r in before]


def test_count_partial_rounds_a_mooncake_prompt_up(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}))
    assert [r.prompt_tokens for r in requests_of(Mooncake(str(path)))] == [600]
    assert [r.prompt_tokens for r in requests_of(Mooncake(str(path), count_partial=True))] == [1024]


@pytest.mark.parametrize("option", "aiperf azure bailian burstgpt jsonl reblocked servegen slice weka".split())
def test_options_lack_nothing_but_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MCJAX_TRACES", raising=False)
    with pytest.raises(ConfigError, match=r"workload\.(of\.)?path=.*no such (file|folder)"):
        workload_of(compose([f"workload={option}"]))


def starts_of(*overrides: str) -> list[int]:
    return [session.start_ns for session in workload_of(compose(overrides)).sessions()]


def test_inner_workloads_play_on_the_stream_of_the_run() -> None:
    """Neither on the run's root seed nor on one that stands in the config: as the same workload would alone."""
    alone = starts_of("workload=synthetic", "workload.sessions=5", "seed=4")
    inner = ("workload@workload.of=synthetic", "workload.of.sessions=5", "seed=4")
    for wrapper in ("slice", "reblocked"):
        assert starts_of(f"workload={wrapper}", *inner) == alone
        assert starts_of(f"workload={wrapper}", *inner, "workload.of.seed=99") == alone
        assert starts_of(f"workload={wrapper}", *inner[:-1], "seed=5") != alone
    nested = ("workload=slice", "workload@workload.of=reblocked", "workload@workload.of.of=synthetic")
    assert starts_of(*nested, "workload.of.of.sessions=5", "seed=4") == alone


def test_parts_play_on_streams_of_their_own_whether_or_not_they_can_be_reseeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_traffic.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    own = "{_target_: own_traffic.Own, seed: 1}"
    parts = f"parts={{a: {own}, b: {own}, c: {{_target_: mcjax.workload.slice.Slice, of: {own}}}}}"
    both = workload_of(compose(["workload=superposed", f"+workload.{parts}", "seed=4"]))
    again = workload_of(compose(["workload=superposed", f"+workload.{parts}", "seed=4"]))
    requests = requests_of(both)
    assert len({request.max_tokens for request in requests}) == 3, "each was made with another seed"
    assert [request.max_tokens for request in requests] == [request.max_tokens for request in requests_of(again)]


OWN = """
from mcjax.types import Request, Script
from mcjax.workload.base import Turn
from mcjax.workload.replay import OneTurn

class Own:
    name, block_tokens = "own", 4

    def __init__(self, seed):
        self.seed = seed

    def sessions(self):
        yield OneTurn(Turn(Request(0, 0, 4, self.seed, trace_ids=(0,), trace_block_tokens=4), Script(1)))

    def inputs(self):
        return {}
"""


def test_hydra_makes_them(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [{"timestamp": 1000 * i, "input_length": 600, "output_length": 5, "hash_ids": [0, i + 1]} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = f"workload.of.path={path}"
    assert len(requests_of(workload_of(compose(["workload=slice", where, "workload.start_s=2"])))) == 2
    reblocked = workload_of(compose(["workload=reblocked", where, "workload.block_tokens=256"]))
    assert reblocked.block_tokens == 256
    overrides = ["workload=superposed", "+workload@workload.parts.x=synthetic", "+workload@workload.parts.y=mooncake"]
    both = workload_of(compose([*overrides, f"workload.parts.y.path={path}", "workload.parts.x.sessions=3"]))
    assert {request.session.split("/")[0] for request in requests_of(both)} == {"x", "y"}
    overrides = ["workload=slice", "workload@workload.of=synthetic", "workload.limit=2", "seed=4"]
    assert requests_of(workload_of(compose(overrides)))[0].tokens is not None
