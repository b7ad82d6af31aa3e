"""The same architecture on both sides, with random weights: mcjax's step programs, and transformers on torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from engine_timing import Contestant, peer

from mcjax.backends.jax.programs import Geometry, Programs, pack_row
from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import Parameter
from mcjax.models.decoder import Decoder

SMOLLM2 = {
    "layers": 30,
    "d_model": 576,
    "heads": 9,
    "kv_heads": 3,
    "head_dim": 64,
    "d_ff": 1536,
    "vocab": 49152,
    "rope_theta": 1e5,
}
TINY = {
    "layers": 2,
    "d_model": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "d_ff": 128,
    "vocab": 512,
    "rope_theta": 1e5,
}
PAGE_TOKENS = 16
MAX_POSITIONS = 8192


class Ours:
    """The programs that an executor runs, on one device."""

    def __init__(self, sizes: dict[str, Any], dtype: str):
        nbytes = jnp.dtype(dtype).itemsize
        self.shape = ModelShape("same", **sizes, tied_embeddings=True, dtype_bytes=nbytes, kv_dtype_bytes=nbytes)
        draw = np.random.default_rng(0)

        def weights(name: str, parameter: Parameter) -> jax.Array:
            if parameter.init != "uniform":
                return jnp.full(parameter.shape, parameter.init == "ones", dtype)
            numbers = draw.standard_normal(parameter.shape, dtype=np.float32)
            return jnp.asarray(numbers * parameter.fan_in**-0.5, dtype)

        self.model = Decoder(self.shape, MAX_POSITIONS, weights)

    def step(self, batch: int, width: int, start: int) -> Contestant:
        """`width` tokens of each of `batch` sequences, after `start` that are there already; up to the logits."""
        pages_each = -(-(start + width) // PAGE_TOKENS)
        geometry = Geometry(batch * pages_each, PAGE_TOKENS, batch, width, pages_each * PAGE_TOKENS)
        programs = Programs(self.model, geometry)
        on_device = programs.on(jax.local_devices()[0])
        program = on_device.model(batch, width)
        draw = np.random.default_rng(1)
        rows = np.stack(
            [
                pack_row(
                    width,
                    width,
                    start,
                    draw.integers(0, self.shape.vocab, width, dtype=np.int32),
                    list(range(row * pages_each, (row + 1) * pages_each)),
                    geometry,
                )
                for row in range(batch)
            ]
        )
        # Zeros, not the NaN of new pages: what lies before `start` must look computed.
        pages = [jnp.zeros_like(on_device.new_pages())]

        def step() -> None:
            logits, pages[0] = program(on_device.weights, pages[0], rows)
            logits.block_until_ready()

        return Contestant(step)

    def read_bytes(self, batch: int, context: int) -> int:
        """What one decode step must read: every weight once, and the keys and values of all contexts."""
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(self._weights()))
        return weights + batch * context * self.shape.kv_bytes_per_token

    def flops(self, tokens: int) -> float:
        """Of the prefill of one prompt: products with weights, causal attention, logits of the last token."""
        shape = self.shape
        attended = shape.heads * shape.head_dim
        layer = shape.d_model * (2 * attended + 2 * shape.kv_heads * shape.head_dim + 3 * shape.d_ff)
        attention = 2 * attended * tokens * (tokens + 1)
        return shape.layers * (2.0 * layer * tokens + attention) + 2.0 * shape.d_model * shape.vocab

    def _weights(self) -> Any:
        from flax import nnx

        return nnx.state(self.model, nnx.Param)


class Theirs:
    """`LlamaForCausalLM`, its default attention (torch's scaled_dot_product_attention) and its default cache."""

    def __init__(self, sizes: dict[str, Any], dtype: str, threads: int):
        self._torch = peer("torch")
        transformers = peer("transformers")
        self._torch.set_num_threads(threads)
        self._dtype = getattr(self._torch, dtype)
        self._sizes = sizes
        self._cache: Callable[[], Any] = transformers.DynamicCache
        config = transformers.LlamaConfig(
            num_hidden_layers=sizes["layers"],
            hidden_size=sizes["d_model"],
            num_attention_heads=sizes["heads"],
            num_key_value_heads=sizes["kv_heads"],
            head_dim=sizes["head_dim"],
            intermediate_size=sizes["d_ff"],
            vocab_size=sizes["vocab"],
            tie_word_embeddings=True,
            max_position_embeddings=MAX_POSITIONS,
        )
        self._model = transformers.LlamaForCausalLM(config).to(self._dtype).eval()

    def step(self, batch: int, width: int, start: int) -> Contestant:
        """The same step as `Ours.step`."""
        torch = self._torch
        tokens = torch.randint(0, self._sizes["vocab"], (batch, width))
        cache = self._cache()
        if start:
            shape = (batch, self._sizes["kv_heads"], start, self._sizes["head_dim"])
            for layer in range(self._sizes["layers"]):
                cache.update(torch.randn(shape, dtype=self._dtype), torch.randn(shape, dtype=self._dtype), layer)
        held = [cache]

        def step() -> None:
            with torch.inference_mode():
                self._model(tokens, cache=held[0], use_cache=True, logits_to_keep=1)

        def after() -> None:
            if start:
                held[0].crop(-width)
            else:
                held[0] = self._cache()

        return Contestant(step, after)
