"""Experts against a loop over tokens; and that nobody else's token changes a bit of one's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_fixtures import Drawn, padded_step

from mcjax.cost.architecture import Routing
from mcjax.cost.model_shape import ModelShape
from mcjax.models.layers.experts import Experts, route
from mcjax.models.layers.grouped import grouped
from mcjax.models.quantised import QuantArray
from mcjax.models.weights import Maker

ROUTINGS = {
    "mixtral": Routing(),
    "plain": Routing(normalised=False),
    "bias": Routing(scores="sigmoid", bias=True, scale=2.5),
    "groups": Routing(scores="sigmoid", bias=True, groups=4, groups_per_token=2, scale=2.5),
    "groups-of-one": Routing(scores="sigmoid", groups=8, groups_per_token=3),
}


def shape(routing: Routing, **changes: Any) -> ModelShape:
    sizes: dict[str, Any] = {
        "layers": 1, "d_model": 48, "heads": 2, "kv_heads": 2, "head_dim": 8, "d_ff": 80, "vocab": 31, "experts": 8,
        "experts_per_token": 3, "expert_d_ff": 24, "dtype_bytes": 4, "kv_dtype_bytes": 4,
    }  # fmt: skip
    return ModelShape("experts", **(sizes | changes), routing=routing)


def chosen_by_hand(logits: np.ndarray, bias: np.ndarray, routing: Routing, per_token: int) -> dict[int, float]:
    """Of one token, in float64, as the papers say it."""
    if routing.scores == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits) / np.exp(logits).sum()
    wanted = scores + (bias if routing.bias else 0)
    experts = range(len(logits))
    if routing.groups > 1:
        size = len(logits) // routing.groups
        value = [np.sort(wanted[first : first + size])[-2:].sum() for first in range(0, len(logits), size)]
        groups = sorted(range(routing.groups), key=lambda group: -value[group])[: routing.groups_per_token]
        experts = [expert for expert in experts if expert // size in groups]
    best = sorted(experts, key=lambda expert: -wanted[expert])[:per_token]
    total = sum(scores[expert] for expert in best) if routing.normalised else 1.0
    return {expert: float(scores[expert] / total * routing.scale) for expert in best}


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_choice_is_that_of_the_papers(name: str) -> None:
    routing, draw = ROUTINGS[name], np.random.default_rng(1)
    logits, bias = draw.normal(size=(50, 8)) * 2, draw.normal(size=8) * 0.5
    given_bias = jnp.asarray(bias) if routing.bias else None
    weights, chosen = route(jnp.asarray(logits), given_bias, 3, routing)
    for token in range(50):
        want = chosen_by_hand(logits[token], bias, routing, 3)
        got = dict(zip(chosen[token].tolist(), weights[token].tolist(), strict=True))
        assert got.keys() == want.keys()
        assert got == pytest.approx(want, rel=1e-5)


def test_equal_scores_go_to_the_lower_number_and_a_bias_weighs_nothing() -> None:
    weights, chosen = route(jnp.zeros((1, 8)), jnp.arange(8.0) % 4, 3, Routing(scores="sigmoid", bias=True))
    assert chosen.tolist() == [[3, 7, 2]]
    np.testing.assert_allclose(weights, [[1 / 3] * 3], rtol=1e-6)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("shared", [0, 2])
def test_a_layer_is_its_tokens_one_by_one(flat: bool, shared: int) -> None:
    routing = ROUTINGS["groups"]
    wanted = shape(routing, shared_experts=shared)
    source = Drawn()
    layer = Experts(wanted, Maker(wanted, source), "blocks.0.feed_forward")
    x = np.random.default_rng(2).normal(size=(3, 5, 48)).astype(np.float32)
    got = np.asarray(jax.jit(lambda x: layer(x, padded_step((3, 5), flat)))(x))

    weight = {name.removeprefix("blocks.0.feed_forward."): value for name, value in source.wide.items()}

    def one(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
        gate, up = x @ gate_up[:, 0], x @ gate_up[:, 1]
        return (gate / (1 + np.exp(-gate)) * up) @ down

    for row, column in np.ndindex(3, 5):
        token = x[row, column].astype(np.float64)
        chosen = chosen_by_hand(token @ weight["router"], weight["router_bias"], routing, 3)
        want = sum(share * one(token, weight["gate_up"][e], weight["down"][e]) for e, share in chosen.items())
        if shared:
            want = want + one(token, weight["shared.gate_up"], weight["shared.down"])
        np.testing.assert_allclose(got[row, column], want, rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def layer(request: pytest.FixtureRequest) -> Any:
    wanted = shape(ROUTINGS["groups"], shared_experts=1, dtype_bytes=4 if request.param == "float32" else 2)
    made = Experts(wanted, Maker(wanted, Drawn(wanted.dtype)), "blocks.0.feed_forward")
    return jax.jit(lambda x: made(x.astype(wanted.dtype), padded_step(x.shape[:2])).astype(jnp.float32))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**31), place=st.tuples(st.integers(0, 3), st.integers(0, 6)), poison=st.booleans())
def test_a_token_depends_on_itself_alone(layer: Any, seed: int, place: tuple[int, int], poison: bool) -> None:
    """To the bit, wherever it stands and whoever stands beside it: also tokens that are not numbers at all."""
    token = np.random.default_rng(0).normal(size=48).astype(np.float32)
    alone = np.zeros((4, 7, 48), np.float32)
    alone[0, 0] = token
    others = np.random.default_rng(seed).normal(size=(4, 7, 48)).astype(np.float32)
    if poison:
        others[seed % 4] = np.nan
    others[place] = token
    np.testing.assert_array_equal(np.asarray(layer(others))[place], np.asarray(layer(alone))[0, 0])


product = jax.jit(grouped)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**31))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_of_a_grouped_product_depends_on_no_other(dtype: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(6, 96, 2, 40)), dtype)
    owners = np.sort(draw.integers(0, 6, 33))
    place = int(draw.integers(33))
    x = draw.normal(size=(33, 96)).astype(jnp.dtype(dtype))
    got = np.asarray(product(x, weight, owners))
    assert got.dtype == np.float32
    other, rest = np.full_like(x, np.nan), np.sort(np.r_[owners[place], draw.integers(0, 6, 32)])
    new_place = int(np.flatnonzero(rest == owners[place])[-1])
    other[new_place] = x[place]
    np.testing.assert_array_equal(np.asarray(product(other, weight, rest))[new_place], got[place])
    narrow = x[place].astype(np.float64)
    wide = np.asarray(weight[owners[place]].astype(jnp.float32), np.float64)
    np.testing.assert_allclose(got[place], np.einsum("i,ico->co", narrow, wide), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flat", [True, False])
def test_a_grouped_product_of_eight_bits_is_scaled_by_each_rows_own(flat: bool) -> None:
    draw = np.random.default_rng(5)
    numbers = draw.integers(-127, 128, (3, 16, 2, 5)).astype(np.int8)
    scales = draw.uniform(0.1, 2, (3, 1, 2, 5)).astype(np.float32)
    owners, x = np.array([0, 0, 2, 2]), draw.normal(size=(4, 16)).astype(np.float32)
    got = grouped(jnp.asarray(x), QuantArray(jnp.asarray(numbers), jnp.asarray(scales)), jnp.asarray(owners), flat)
    want = np.einsum("ni,nico->nco", x.astype(np.float64), (numbers * scales.astype(np.float64))[owners])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)
