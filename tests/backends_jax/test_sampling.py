from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mcjax.backends.jax.sampling import sample


def draw(logits, temperature=1.0, seed=(0, 1), position: int | np.ndarray = 0):
    rows = logits.shape[0]
    positions = jnp.broadcast_to(jnp.asarray(position, jnp.int32).reshape(-1, 1), (rows, 1))
    words = jnp.concatenate([jnp.broadcast_to(jnp.asarray(seed, jnp.int32), (rows, 2)), positions], axis=1)
    return np.asarray(jax.jit(sample)(logits, words, jnp.full(rows, temperature, jnp.float32)))[:, 0]


def test_a_row_whose_logits_are_no_numbers_says_so():
    logits = jnp.array([[0.0, 1.0], [jnp.nan, 1.0], [-jnp.inf, 1.0], [jnp.inf, 1.0]])
    words = jnp.zeros((4, 3), jnp.int32)
    assert np.asarray(sample(logits, words, jnp.zeros(4)))[:, 1].tolist() == [1, 0, 1, 0]


def test_one_broken_logit_in_a_wide_row_is_enough():
    for place in (0, 7, 1024, 2047):
        logits = np.random.default_rng(0).normal(size=(2, 2048)).astype(np.float32)
        logits[1, place] = np.nan
        found = np.asarray(jax.jit(sample)(logits, jnp.zeros((2, 3), jnp.int32), jnp.zeros(2)))
        assert found[:, 1].tolist() == [1, 0]


def test_greedy_takes_the_lowest_of_equals():
    assert draw(jnp.array([[0.0, 3.0, 3.0, 1.0]]), temperature=0.0).tolist() == [1]


def test_key_is_seed_and_position_and_equals_the_plain_formula():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 50)), jnp.float32)
    tokens = {(seed, at): int(draw(logits, 2.0, (0, seed), at)[0]) for seed in range(5) for at in range(5)}
    assert len(set(tokens.values())) > 5
    key = jax.random.fold_in(jax.random.key(3), 4)
    want = jnp.argmax(logits[0] / 2.0 + jax.random.gumbel(key, (50,)))
    assert tokens[3, 4] == int(want)
    assert any(int(draw(logits, 2.0, (1, 3), at)[0]) != tokens[3, at] for at in range(5)), "the high word counts"


def test_frequencies_follow_the_softmax():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    count = 4000
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(probabilities, jnp.float32)), (count, 4))
    tokens = draw(logits, 1.0, (0, 9), np.arange(count))
    found = np.bincount(tokens, minlength=4) / count
    # Five standard deviations of the largest share: sqrt(0.25 / 4000) = 0.008.
    np.testing.assert_allclose(found, probabilities, atol=0.04)
