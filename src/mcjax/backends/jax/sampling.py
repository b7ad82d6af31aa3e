"""Choosing the next token on the device, by a counter-based generator keyed (seed, position).

Programs of their own, behind the model's: so the model is compiled once whatever a request asks of its sampler, and
logits stay on the device. `sample` is for batches that ask for no more than a temperature, `sample_fully` for all
others; a row that could do with the first gets the same token from both.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from mcjax.engine.base import MOST_LOGPROBS, MOST_STOPS

FULL_WORDS = 9 + MOST_STOPS
"""Words of a row of `sample_fully` before its history."""
FULL_NUMBERS = 6


def sample(
    logits: Float[Array, "B V"],
    words: Int[Array, "B 3"],
    temperatures: Float[Array, " B"],
) -> Int[Array, "B 2"]:
    """One token a row, and whether it means anything: 0 beside it says that no logit was a finite number.

    `words` holds the high and low word of each row's seed, and the position where the token will lie. Temperature 0
    takes the largest logit, the lowest id among equals. Otherwise Gumbel noise is added to `logits / temperature`: a
    row's noise is a function of its seed and position, whatever its slot and batch mates.
    """
    return jnp.stack([_choose(logits, words, temperatures), _sound(logits)], axis=1)


def sample_fully(
    logits: Float[Array, "B V"],
    words: Int[Array, "B W"],
    numbers: Float[Array, "B 6"],
) -> Int[Array, "B 3+2K"]:
    """`sample` with everything that `mcjax.types.Sampling` may ask for, in its order.

    `words` of a row: those of `sample`, top-k (0: all), length of its prompt and of prompt and output, whether stop
    tokens are held back, the token known to come (-1: none), whether log probabilities are wanted, `MOST_STOPS` stop
    tokens (-1: none), then its history: the ids of prompt and output, padded. `numbers`: temperature, top-p, min-p,
    repetition, presence and frequency penalty.

    Beside the answer of `sample` come, as the bits of float32, the token's log probability in the model's own
    distribution, then the `K` likeliest tokens and (bits again) theirs. A token on a filter's edge stays, and with it
    all that are as likely: a filter does not choose among equals.

    Each part is skipped when no row of the batch asks for it; a row that does not is the same to the bit either way.
    """
    vocabulary = logits.shape[1]
    top_k, held, known, wanted = words[:, 3], words[:, 6], words[:, 7], words[:, 8]
    stops = words[:, 9:FULL_WORDS]
    warm = numbers[:, 0] > 0
    top_p, min_p = numbers[:, 1], numbers[:, 2]
    penalised = (numbers[:, 3] != 1) | (numbers[:, 4] != 0) | (numbers[:, 5] != 0)
    # The likeliest token passes every filter, so they are nothing to greedy rows.
    filtered = warm & ((top_k > 0) | (top_p < 1) | (min_p > 0))

    scores = jax.lax.cond(
        penalised.any(),
        lambda: jnp.where(penalised[:, None], _penalise(logits, words, numbers[:, 3:]), logits),
        lambda: logits,
    )
    held_back = jnp.where((held > 0)[:, None] & (stops >= 0), stops, vocabulary)
    scores = jax.vmap(lambda row, ids: row.at[ids].set(-jnp.inf, mode="drop"))(scores, held_back)

    def passing() -> Float[Array, "B V"]:
        scaled = scores / jnp.where(warm, numbers[:, 0], 1)[:, None]
        least = jnp.maximum(_cut(scaled, top_k, top_p), scaled.max(axis=-1) + jnp.log(min_p))
        return jnp.where(~filtered[:, None] | (scaled >= least[:, None]), scores, -jnp.inf)

    scores = jax.lax.cond(filtered.any(), passing, lambda: scores)
    chosen = jnp.where(known >= 0, known, _choose(scores, words, numbers[:, 0]))
    most = min(MOST_LOGPROBS, vocabulary)

    def logprobs() -> Int[Array, "B 1+2K"]:
        whole = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        top, ids = jax.lax.top_k(logits, most)
        own = jnp.take_along_axis(logits, chosen[:, None], axis=-1)
        return jnp.concatenate([_bits(own - whole), ids, _bits(top - whole)], axis=1)

    nothing = jnp.zeros((len(logits), 1 + 2 * most), jnp.int32)
    told = jax.lax.cond((wanted > 0).any(), logprobs, lambda: nothing)
    return jnp.concatenate([jnp.stack([chosen, _sound(logits)], axis=1), told], axis=1)


def _bits(values: Float[Array, "B N"]) -> Int[Array, "B N"]:
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def _sound(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    # NaN anywhere is the mark of a broken row; an infinite logit may be a mask. XLA's maximum on CPU may pass NaN over.
    return (jnp.isfinite(logits.max(axis=-1)) & ~jnp.isnan(logits).any(axis=-1)).astype(jnp.int32)


def noise(seed: UInt32[Array, " 2"], position: Int[Array, ""], vocabulary: int) -> Float[Array, " V"]:
    """What is added to a row's logits over temperature, for the token at `position`."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (vocabulary,), jnp.float32)


def _choose(
    logits: Float[Array, "B V"], words: Int[Array, "B W"], temperatures: Float[Array, " B"]
) -> Int[Array, " B"]:
    def drawn(seed: UInt32[Array, " 2"], position: Int[Array, ""]) -> Float[Array, " V"]:
        return noise(seed, position, logits.shape[1])

    seeds = jax.lax.bitcast_convert_type(words[:, :2], jnp.uint32)
    warm = temperatures > 0
    scale = jnp.where(warm, temperatures, 1)[:, None]

    def noisy() -> Float[Array, "B V"]:
        return jnp.where(warm[:, None], logits / scale + jax.vmap(drawn)(seeds, words[:, 2]), logits)

    # A vocabulary's worth of noise costs more than the rest together: not for a batch that is greedy throughout.
    scores = jax.lax.cond(warm.any(), noisy, lambda: logits)
    # A fifth of the time of `argmax`. A row without numbers finds nothing, and has been told of elsewhere.
    ids = jnp.arange(scores.shape[1], dtype=jnp.int32)[None, :]
    best = scores == scores.max(axis=-1, keepdims=True)
    return jnp.where(best, ids, scores.shape[1] - 1).min(axis=-1)


def _penalise(
    logits: Float[Array, "B V"], words: Int[Array, "B W"], penalties: Float[Array, "B 3"]
) -> Float[Array, "B V"]:
    """A seen token's logit is divided by the repetition penalty (multiplied, below 0); then, by what there is of it in
    the output, presence and frequency penalties are taken off."""
    vocabulary = logits.shape[1]
    history = words[:, FULL_WORDS:]
    place = jnp.arange(history.shape[1])[None, :]
    prompt, length = words[:, 4:5], words[:, 5:6]

    def counts(ids: Int[Array, " C"]) -> Int[Array, " V"]:
        return jnp.zeros(vocabulary, jnp.int32).at[ids].add(1, mode="drop")

    in_prompt = jax.vmap(counts)(jnp.where(place < prompt, history, vocabulary))
    in_output = jax.vmap(counts)(jnp.where((place >= prompt) & (place < length), history, vocabulary))
    repetition, presence, frequency = penalties[:, 0:1], penalties[:, 1:2], penalties[:, 2:3]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    scores = jnp.where(in_prompt + in_output > 0, repeated, logits)
    return scores - frequency * in_output - presence * (in_output > 0)


def _cut(scores: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]) -> Float[Array, " B"]:
    """The score below which top-k, then top-p (of what top-k leaves), let nothing pass; -inf where they pass all."""
    keys = _ordered(scores)
    everything = jnp.full(len(scores), -jnp.inf)

    def by_count() -> Float[Array, " B"]:
        ones = jnp.ones_like(scores)
        return jnp.where(top_k > 0, _largest(keys, ones, top_k.astype(jnp.float32)), everything)

    least = jax.lax.cond((top_k > 0).any(), by_count, lambda: everything)

    def by_mass() -> Float[Array, " B"]:
        weights = jnp.where(scores >= least[:, None], jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
        return jnp.where(top_p < 1, _largest(keys, weights, top_p * weights.sum(axis=-1)), everything)

    return jnp.maximum(least, jax.lax.cond((top_p < 1).any(), by_mass, lambda: everything))


def _ordered(scores: Float[Array, "..."]) -> Int[Array, "..."]:
    """Integers in the order of the numbers."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _largest(keys: Int[Array, "B V"], weights: Float[Array, "B V"], enough: Float[Array, " B"]) -> Float[Array, " B"]:
    """The largest score such that it and what lies above it together weigh enough; -inf if nothing does.

    Found bit by bit: 32 passes over a vocabulary take a twentieth of the time of sorting it.
    """

    def narrow(step: Int[Array, ""], found: Int[Array, " B"]) -> Int[Array, " B"]:
        higher = found + jax.lax.shift_left(jnp.int32(1), 31 - step)
        weight = jnp.where(keys >= higher[:, None], weights, 0).sum(axis=-1)
        return jnp.where(weight >= enough, higher, found)

    lowest = jnp.full(len(keys), jnp.iinfo(jnp.int32).min, jnp.int32)
    found = jax.lax.fori_loop(0, 32, narrow, lowest)
    found = jnp.maximum(found, _ordered(jnp.float32(-jnp.inf)))
    return jax.lax.bitcast_convert_type(found ^ ((found >> 31) & 0x7FFFFFFF), jnp.float32)
