"""One step of training: the model's own blocks over rows without pages, cross-entropy of the next token, AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from mcjax.cost.model_shape import ModelShape
from mcjax.models.builtin import SeededWeights
from mcjax.models.decoder import Decoder

GAINS = {"embedding": 0.3, "head": 0.3, "output": 0.3, "down": 0.3}
"""Of the weights that training begins with: a nearly empty residual stream, nearly even logits."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model is trained, but for the text. Every number of it is in the card."""

    steps: int
    seed: int = 0
    tokens_per_step: int = 1024
    row_tokens: int = 128
    long_row_tokens: int = 256
    """Of the last steps: attention over long rows is most of their cost."""
    context_tokens: int = 2048
    """Positions that the model is to be used at. Half of the rows skip some, so that every distance is seen."""
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    last_share: float = 0.3
    """Of the steps: those in which the rate falls, and rows are long."""
    weight_decay: float = 0.1
    gradient_norm: float = 1.0
    taught: float = 0.0
    """Share of the loss that is distance to a teacher's probabilities, in place of the text."""

    @property
    def first_steps(self) -> int:
        """Steps before the last ones: what they do does not depend on how many there are."""
        return self.steps - round(self.steps * self.last_share)

    def batch(self, text: NDArray[np.int32], step: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Rows `[B, T + 1]` of `text` for one step, and positions `[B, T]`: a function of seed and step alone.

        A row that skips has a gap of positions at a random place (PoSE, arXiv:2309.10400): distances as in a long
        context at the price of a short one. Angles that were never seen would be noise.
        """
        length = self.long_row_tokens if step >= self.first_steps else self.row_tokens
        count = max(self.tokens_per_step // length, 2)
        random = np.random.default_rng([self.seed, step])
        starts = random.integers(0, text.size - length, count)
        gaps = random.integers(0, self.context_tokens - length, count) * (np.arange(count) % 2)
        places = random.integers(1, length, count)
        own = np.arange(length)
        positions = own + gaps[:, None] * (own >= places[:, None])
        return text[starts[:, None] + np.arange(length + 1)], positions.astype(np.int32)

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW (arXiv:1711.05101) behind a clip; norms do not decay. The rate rises, stays, and falls to nothing."""
        rise = optax.linear_schedule(0.0, self.learning_rate, self.warmup_steps)
        fall = optax.linear_schedule(self.learning_rate, 0.0, self.steps - self.first_steps)
        rate = optax.join_schedules(
            [rise, optax.constant_schedule(self.learning_rate), fall],
            [self.warmup_steps, max(self.first_steps, self.warmup_steps)],
        )
        decays = lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)  # noqa: E731
        return optax.chain(
            optax.clip_by_global_norm(self.gradient_norm),
            optax.adamw(rate, b1=0.9, b2=0.98, weight_decay=self.weight_decay, mask=decays),
        )


def dense_attention(
    queries: Float[Array, "B T H D"],
    keys: Float[Array, "B T Hkv D"],
    values: Float[Array, "B T Hkv D"],
    pages: Any,
    layer: int,
    page_table: Any,
    positions: Int[Array, "B T"],
    /,
    **options: Any,
) -> tuple[Float[Array, "B T H D"], Any]:
    """Causal attention inside each row. A `kernels.base.Attention` that looks at no pages, and takes no options."""
    if any(value is not None for value in options.values()):
        raise ValueError(f"training has no attention with {', '.join(options)}")
    steps, dim = keys.shape[1], keys.shape[3]
    grouped = queries.reshape(*keys.shape[:3], -1, dim) * dim**-0.5
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, keys)
    visible = jnp.tril(jnp.ones((steps, steps), bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    return jnp.einsum("bkgts,bskd->btkgd", weights, values).reshape(queries.shape), pages


Logits = Callable[[Any, Int[Array, "B T"], Int[Array, "B T"]], Float[Array, "B T V"]]
"""Parameters, tokens, positions -> logits at every place."""


def untrained(shape: ModelShape, recipe: Recipe) -> tuple[dict[str, Array], Logits]:
    """Parameters by name as training begins with them, and the model as a function of parameters."""
    return as_function(Decoder(shape, recipe.context_tokens, SeededWeights(shape, recipe.seed, GAINS)))


def as_function(model: Decoder) -> tuple[dict[str, Array], Logits]:
    """A model's parameters by name, and the logits that it has with any of their kind."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    paths = {".".join(map(str, path)): path for path, _ in nnx.to_flat_state(params)}

    def logits(values: dict[str, Array], tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Array:
        flat = {paths[name]: nnx.Param(value) for name, value in values.items()}
        whole = nnx.merge(graph, nnx.from_flat_state(flat), rest)
        nothing = jnp.zeros((1, 1), jnp.int32)
        stream, _ = whole.stream(tokens, positions, nothing, nothing, dense_attention)
        return whole.logits(stream.reshape(-1, stream.shape[-1])).reshape(*tokens.shape, -1)

    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(params)}, logits


def trainer(recipe: Recipe, logits: Logits, teacher: Callable[[Array, Array], Array] | None = None) -> Any:
    """Compiled: `(parameters, optimizer's state, rows, positions) -> (parameters, state, loss of the text in nats)`."""
    optimizer = recipe.optimizer()

    def loss(params: Any, rows: Array, positions: Array) -> tuple[Array, Array]:
        guess = jax.nn.log_softmax(logits(params, rows[:, :-1], positions))
        text = -jnp.take_along_axis(guess, rows[:, 1:, None], axis=-1).mean()
        if teacher is None:
            return text, text
        taught = -(jax.nn.softmax(teacher(rows[:, :-1], positions)) * guess).sum(-1).mean()
        return recipe.taught * taught + (1 - recipe.taught) * text, text

    def step(params: Any, state: Any, rows: Array, positions: Array) -> tuple[Any, Any, Array]:
        gradients, text = jax.grad(loss, has_aux=True)(params, rows, positions)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, text

    return jax.jit(step, donate_argnums=(0, 1))
