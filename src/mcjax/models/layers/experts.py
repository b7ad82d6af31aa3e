"""Mixtures of experts: each token is computed by the few feed-forward layers that a router chooses for it.

Nothing has a capacity, and no token is dropped: what becomes of a token depends on that token alone.
Sources: Mixtral (arXiv:2401.04088) 2.1; DeepSeek-V3 (arXiv:2412.19437) 2.1.2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mcjax.cost.architecture import Routing
from mcjax.cost.model_shape import ModelShape
from mcjax.models.layers.feed_forward import ACTIVATIONS, FeedForward
from mcjax.models.layers.grouped import grouped
from mcjax.models.layers.linear import einsum
from mcjax.models.layers.step import Step
from mcjax.models.weights import Maker

BEST_OF_GROUP = 2
"""Scores that a group of experts is judged by."""


class Experts(nnx.Module):
    """Routed experts, and one that every token takes, if the shape has such."""

    def __init__(self, shape: ModelShape, make: Maker, name: str):
        self.routing, self.per_token = shape.routing, shape.experts_per_token
        self.activation = shape.activation
        self.router = nnx.Param(make(f"{name}.router"))
        self.router_bias = nnx.Param(make(f"{name}.router_bias")) if shape.routing.bias else None
        self.gate_up = nnx.Param(make(f"{name}.gate_up"))
        self.down = nnx.Param(make(f"{name}.down"))
        self.shared = FeedForward(shape, make, f"{name}.shared") if shape.shared_experts else None

    def __call__(self, x: Float[Array, "B T E"], step: Step) -> Float[Array, "B T E"]:
        logits = einsum("bte,ex->btx", x, self.router[...], step.flat)
        tokens = x.reshape(-1, x.shape[-1])
        bias = None if self.router_bias is None else self.router_bias[...]
        weights, chosen = route(logits.reshape(len(tokens), -1), bias, self.per_token, self.routing)
        # Copies of tokens, those of one expert side by side.
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        owners = chosen.reshape(-1)[order]
        both = grouped(tokens[order // self.per_token], self.gate_up[...], owners, step.flat).astype(x.dtype)
        hidden = ACTIVATIONS[self.activation](both[:, 0]) * both[:, 1]
        found = grouped(hidden, self.down[...], owners, step.flat)
        # Back to where the copies were: of each token, in the order of its choice, whatever else is in the batch.
        found = found[jnp.argsort(order)].reshape(*chosen.shape, -1)
        mixed = (found * weights[..., None]).sum(axis=1).reshape(x.shape)
        if self.shared is not None:
            mixed = mixed + self.shared(x, step)
        return mixed.astype(x.dtype)


def route(
    logits: Float[Array, "N X"], bias: Float[Array, " X"] | None, per_token: int, routing: Routing
) -> tuple[Float[Array, "N K"], Int[Array, "N K"]]:
    """Weights (float32) and numbers of each token's experts, best first; of equal ones, the lower number.

    `bias` is added to what is chosen by and not to what is weighted with. With `routing.groups`, experts are chosen
    among the best groups only: a group is as good as its two best experts together.
    """
    logits = logits.astype(jnp.float32)
    scores = jax.nn.sigmoid(logits) if routing.scores == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    wanted = scores if bias is None else scores + bias.astype(jnp.float32)
    if routing.groups > 1:
        by_group = wanted.reshape(len(wanted), routing.groups, -1)
        best, _ = jax.lax.top_k(by_group, min(BEST_OF_GROUP, by_group.shape[-1]))
        _, groups = jax.lax.top_k(best.sum(axis=-1), routing.groups_per_token)
        open_to = (groups[:, :, None] == jnp.arange(routing.groups)).any(axis=1)  # [N, groups]
        wanted = jnp.where(open_to[:, :, None], by_group, -jnp.inf).reshape(wanted.shape)
    _, chosen = jax.lax.top_k(wanted, per_token)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if routing.normalised:
        # Sigmoids may all be nothing.
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return weights * routing.scale, chosen
