"""Fitted and Roofline: exact under splitting, mixed steps above their parts, scalars and vectors agree."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.cost import formulas
from mcjax.cost.base import CostModel
from mcjax.cost.catalogue import fitted, hardware, model
from mcjax.cost.fitted import Fitted
from mcjax.cost.model_shape import ModelShape
from mcjax.cost.padded import Padded
from mcjax.cost.roofline import Roofline
from mcjax.errors import ConfigError

MIXTURE = ModelShape("mixture", 4, 512, 8, 2, 64, 256, 1000, experts=16, experts_per_token=2)
PADDED = Padded("padded", 256, 3_000_001, 7_300, 900_000, 11_003, 3_101)
ADDITIVE = ["fitted", "roofline", "tpu", "tiny-cpu", "experts", "whole-experts"]
NAMES = [*ADDITIVE, "padded"]


@cache
def cost(name: str) -> CostModel:
    if name == "fitted":
        return fitted()
    if name == "padded":
        return PADDED
    shape, machine = {
        "roofline": (model("llama3-70b"), hardware("a800x8")),
        "tpu": (model("llama3-8b"), hardware("tpu_v6e_8")),
        "tiny-cpu": (model("tiny"), hardware("cpu")),
        "experts": (MIXTURE, hardware("h100x8")),
        "whole-experts": (MIXTURE, hardware("h100x8")),
    }[name]
    return Roofline(shape, machine, expert_parallel=name == "whole-experts")


names = st.sampled_from(NAMES)
additive = st.sampled_from(ADDITIVE)
batches = st.integers(1, 300)
contexts = st.integers(0, 4_000_000)
chunks = st.integers(0, 40_000)


@settings(max_examples=100, deadline=None)
@given(additive, st.integers(0, 200_000), st.lists(chunks, max_size=12))
def test_chunks_of_a_prompt_add_up_exactly(name: str, start: int, lengths: list[int]) -> None:
    model_ = cost(name)
    total, at = 0, start
    for length in lengths:
        part = model_.prefill_ns(at, length)
        assert type(part) is int
        assert part >= 0
        total += part
        at += length
    assert total == model_.prefill_ns(start, at - start)
    assert model_.prefill_ns(0, start) + total == model_.prefill_ns(0, at)


@settings(max_examples=100, deadline=None)
@given(names, batches, contexts, st.integers(1, 64), st.data())
def test_macro_steps_split_exactly(name: str, batch: int, context: int, steps: int, data: st.DataObject) -> None:
    model_ = cost(name)
    together = model_.step_ns(batch, context, steps)
    assert together.dtype == np.int64
    assert together.shape == (steps,)
    j = data.draw(st.integers(0, steps - 1))
    assert together[j] == model_.step_ns(batch, context + batch * j, 1)[0]
    rest = model_.step_ns(batch, context + batch * j, steps - j)
    np.testing.assert_array_equal(together, np.concatenate([together[:j], rest]))
    assert (np.diff(together) >= 0).all()


@settings(max_examples=100, deadline=None)
@given(names, st.integers(0, 100_000), st.integers(1, 8192), batches, contexts)
def test_a_mixed_step_costs_its_parts_but_reads_the_weights_once(
    name: str, start: int, length: int, batch: int, context: int
) -> None:
    model_ = cost(name)
    mixed = model_.mixed_ns(start, length, batch, context)
    decode = int(model_.step_ns(batch, context, 1)[0])
    chunk = model_.prefill_ns(start, length)
    assert mixed >= max(decode, chunk)
    # The prefix of the chunk is read too in the roofline, which a pure prefill does not charge.
    prefix = int(model_.step_ns(1, start + length, 1)[0])
    assert mixed <= decode + chunk + prefix


@pytest.mark.parametrize("name", NAMES)
def test_mixed_steps_with_one_part_empty(name: str) -> None:
    model_ = cost(name)
    assert model_.mixed_ns(512, 1024, 0, 0) == model_.prefill_ns(512, 1024)
    assert model_.mixed_ns(0, 0, 8, 9000) == model_.step_ns(8, 9000, 1)[0]
    assert model_.step_ns(0, 0, 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_expected_seconds_agree_with_nanoseconds(name: str) -> None:
    model_ = cost(name)
    reused = np.array([0, 1, 512, 100_000, 131_072])
    expected = [model_.prefill_ns(int(start), 131_072 - int(start)) / 1e9 for start in reused]
    found = model_.prefill_s(131_072, reused)
    assert found.shape == (5,)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-9)


@pytest.mark.parametrize("name", NAMES)
def test_expected_decode_seconds_are_the_steps(name: str) -> None:
    model_ = cost(name)
    batch, context = np.array([0, 1, 7, 256, 7]), np.array([0, 5, 40_000, 2_000_000, 40_000])
    expected = [model_.step_ns(int(b), int(c), 1)[0] / 1e9 for b, c in zip(batch, context, strict=True)]
    found = model_.decode_s(batch, context)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=2e-9)  # whole nanoseconds there, none here


def test_a_fit_refuses_what_it_was_not_fitted_on() -> None:
    own = fitted()
    own.check("a800x8", "llama3-70b")
    with pytest.raises(ConfigError, match=r"hardware=h100x8.*fitted on a800x8.*allow_mismatch"):
        own.check("h100x8", "llama3-70b")
    with pytest.raises(ConfigError, match=r"model=llama3-8b.*fitted on llama3-70b"):
        own.check("a800x8", "llama3-8b")
    replace(own, allow_mismatch=True).check("h100x8", "llama3-8b")
    with pytest.raises(ConfigError, match=r"cost\.decode_base_ns=1\.5"):
        Fitted("x", 1, 1, 1.5, 0, 0)  # pyright: ignore[reportArgumentType]


def test_roofline_refuses_impossible_efficiencies_and_strangers() -> None:
    roofline = Roofline(model("llama3-70b"), hardware("a800x8"))
    roofline.check("a800x8", "llama3-70b")
    with pytest.raises(ConfigError, match="built for a800x8"):
        roofline.check("h100x8", "llama3-70b")
    with pytest.raises(ConfigError, match=r"cost\.memory_efficiency=1\.2"):
        Roofline(model("llama3-70b"), hardware("a800x8"), memory_efficiency=1.2)


def test_roofline_scales_as_it_should() -> None:
    shape = model("llama3-8b")
    slow, fast = hardware("h100x8"), hardware("h200x8")
    # Same compute, more bandwidth: prefill equal, decode faster.
    assert Roofline(shape, slow).prefill_ns(0, 4096) == Roofline(shape, fast).prefill_ns(0, 4096)
    assert Roofline(shape, slow).step_ns(64, 500_000, 1)[0] > Roofline(shape, fast).step_ns(64, 500_000, 1)[0]
    # A slower interconnect costs prefill exactly the all-reduce difference.
    cut = Roofline(shape, replace(slow, interconnect_bytes_per_s=225_000_000_000)).prefill_ns(0, 4096)
    extra = 4096 * 4 * 32 * 4096 * 2 * 7 / 8 * (1 / 225e9 - 1 / 450e9) * 1e9
    assert cut - Roofline(shape, slow).prefill_ns(0, 4096) == pytest.approx(extra, rel=1e-6)
    # A very large batch with short contexts is bound by compute.
    compute_bound = Roofline(shape, slow, layer_overhead_ns=0)
    assert compute_bound.step_ns(20_000, 20_000, 1)[0] > 1.9 * compute_bound.step_ns(10_000, 10_000, 1)[0]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 5000), st.integers(1, 5000))
def test_a_padded_prompt_is_its_chunks_one_by_one(start: int, length: int) -> None:
    """Each computes 256 rows, and reads up to its own end; the last one is no cheaper for being short."""
    ends = [min(end, start + length) for end in range(start + 256, start + length + 256, 256)]
    expected = len(ends) * PADDED.chunk_base_ns + sum(ends) * PADDED.chunk_ps_per_context_token // 1000
    assert PADDED.prefill_ns(start, length) == expected
    split = sum(PADDED.prefill_ns(at, min(256, start + length - at)) for at in range(start, start + length, 256))
    assert abs(split - expected) <= len(ends)


def test_a_padded_decode_step_takes_as_long_as_its_mean_row() -> None:
    one, eight = PADDED.step_ns(1, 1000, 1)[0], PADDED.step_ns(8, 8000, 1)[0]
    assert eight - one == 7 * PADDED.decode_ns_per_sequence


@pytest.mark.parametrize("key", ["chunk_tokens", "chunk_base_ns", "decode_ps_per_context_token"])
def test_padded_constants_are_checked(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        replace(PADDED, **{key: -1})


def test_expert_parallel_sends_tokens_instead_of_reducing_them() -> None:
    """Only the collectives differ: prefill and decode by the same bytes a token, over the interconnect."""
    machine = hardware("h100x8")
    sliced, whole = Roofline(MIXTURE, machine), Roofline(MIXTURE, machine, expert_parallel=True)
    saved = formulas.collective_bytes_per_token(MIXTURE, 8) - formulas.expert_parallel_bytes_per_token(MIXTURE, 8)
    assert saved > 0  # two experts of a token are on two of eight accelerators at most
    expected_ns = 100_000 * saved * 1e9 / machine.interconnect_bytes_per_s
    assert sliced.prefill_ns(0, 100_000) - whole.prefill_ns(0, 100_000) == pytest.approx(expected_ns, rel=1e-3)
    steps = sliced.step_ns(10_000, 0, 1)[0] - whole.step_ns(10_000, 0, 1)[0]
    assert steps == pytest.approx(expected_ns / 10, rel=2e-3)


@pytest.mark.parametrize("shape", [model("llama3-70b"), replace(MIXTURE, experts=12)])
def test_expert_parallel_needs_experts_that_divide(shape: ModelShape) -> None:
    with pytest.raises(ConfigError, match=r"cost\.expert_parallel=True.*8 accelerators share evenly"):
        Roofline(shape, hardware("h100x8"), expert_parallel=True)
