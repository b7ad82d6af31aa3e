"""The built-in model: a small Llama whose weights are a function of a seed, so that a demo needs no download.

Weights are uniform numbers from a counter-based generator (Philox) made by integer arithmetic and one correctly rounded
product: bit-equal on every machine, and each parameter independent of the others.
"""

from __future__ import annotations

import hashlib
import json
import math

import jax
import jax.numpy as jnp
import numpy as np

from mcjax.models.byte_tokenizer import ByteTokenizer
from mcjax.models.llama import Llama, LlamaConfig

DEFAULT_CONFIG = LlamaConfig(
    layers=4, d_model=128, heads=4, kv_heads=2, head_dim=32, d_ff=384, vocab=ByteTokenizer.vocab_size
)

# With random weights and tied embeddings a model echoes its last token unless what the layers add outweighs the
# embedding they start from, and attention must be sharp enough for distant tokens to matter. Chosen by looking at
# greedy outputs: tests/models/test_builtin.py holds them to it.
EMBEDDING_SCALE = 0.1
QUERY_KEY_GAIN = 2.5
RESIDUAL_GAIN = 2.0


def fingerprint(config: LlamaConfig, seed: int) -> str:
    """Hex sha256 that names these weights and their dtype; part of every block key."""
    words = json.dumps({"builtin": 1, "seed": seed, **config.items()}, sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()


class SeededWeights:
    """Uniform weights of variance `gain^2 / fan_in`, by (seed, name). Implements `WeightSource`."""

    def __init__(self, config: LlamaConfig, seed: int):
        self._dtype = jnp.dtype(config.dtype)
        self._seed = seed

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> jax.Array:
        """The parameter `name`; gains (`fan_in` 0) are ones."""
        if fan_in == 0:
            return jnp.ones(shape, self._dtype)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = np.random.Philox(key=np.frombuffer(digest[:16], np.uint64))
        raw = generator.random_raw(math.prod(shape)) >> np.uint64(11)  # 53 bits: exact as float64
        centred = raw.astype(np.float64) - (2.0**52 - 0.5)
        half_width = _gain(name) * math.sqrt(3.0 / fan_in)
        return jnp.asarray((centred * (half_width / 2.0**52)).reshape(shape).astype(self._dtype))


def _gain(name: str) -> float:
    last = name.rsplit(".", 1)[-1]
    if last in ("query", "key"):
        return QUERY_KEY_GAIN
    if last in ("output", "down"):
        return RESIDUAL_GAIN
    return EMBEDDING_SCALE if last == "embedding" else 1.0


def build(config: LlamaConfig = DEFAULT_CONFIG, seed: int = 0, max_positions: int = 4096) -> Llama:
    """The model of `seed`, on jax's default device."""
    return Llama(config, max_positions, SeededWeights(config, seed))
