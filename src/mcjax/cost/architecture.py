"""The parts in which decoders differ: rotary positions, latent attention, routing. Free of jax."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from mcjax.errors import ConfigError

SCALINGS = ("none", "linear", "dynamic", "llama3", "yarn")
ACTIVATIONS = ("silu", "gelu_tanh")
SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. Fields that a kind of scaling does not name are not looked at.

    Sources: RoFormer (arXiv:2104.09864); YaRN (arXiv:2309.00071); the fields are those of Hugging Face configs.
    """

    theta: float = 10_000.0
    scaling: str = "none"
    factor: float = 1.0
    original_context_tokens: int = 0
    """Context that the model was trained with: of `dynamic`, `llama3` and `yarn`."""
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """What `yarn` multiplies cosines and sines by; None: from `factor` and the two below."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    """Whether the bounds of `yarn`'s ramp are whole numbers."""

    def __post_init__(self) -> None:
        one_of("model.rope.scaling", self.scaling, SCALINGS)
        for name in ("theta", "factor"):
            number(f"model.rope.{name}", getattr(self, name), positive=True)
        for name in ("low_frequency_factor", "high_frequency_factor", "beta_fast", "beta_slow"):
            number(f"model.rope.{name}", getattr(self, name), positive=True)
        for name in ("mscale", "mscale_all_dim"):
            number(f"model.rope.{name}", getattr(self, name))
        if self.attention_factor is not None:
            number("model.rope.attention_factor", self.attention_factor, positive=True)
        stretched = self.scaling in ("dynamic", "llama3", "yarn")
        integer("model.rope.original_context_tokens", self.original_context_tokens, least=1 if stretched else 0)
        if self.scaling == "llama3" and self.high_frequency_factor <= self.low_frequency_factor:
            problem = f"must be above low_frequency_factor={self.low_frequency_factor:g}"
            raise ConfigError("model.rope.high_frequency_factor", self.high_frequency_factor, problem)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: keys and values of all heads from one vector a token, beside one rotary key.

    Source: DeepSeek-V2 (arXiv:2405.04434), 2.1.
    """

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int = 0
    """Of the queries' own compression; 0: none."""

    def __post_init__(self) -> None:
        for name in ("kv_rank", "rope_dim", "nope_dim", "value_dim", "query_rank"):
            integer(f"model.latent.{name}", getattr(self, name), least=0 if name == "query_rank" else 1)
        if self.rope_dim % 2:
            raise ConfigError("model.latent.rope_dim", self.rope_dim, "rotary positions need an even size")

    @property
    def cache_dim(self) -> int:
        """Numbers that a layer caches of a token."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts are chosen and weighted.

    Sources: Mixtral (arXiv:2401.04088) 2.1; DeepSeek-V3 (arXiv:2412.19437) 2.1.2: sigmoid scores, a bias that only the
    choice sees, and choice among the best groups.
    """

    scores: str = "softmax"
    normalised: bool = True
    """Whether the chosen experts' weights are divided by their sum."""
    bias: bool = False
    groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        one_of("model.routing.scores", self.scores, SCORES)
        for name in ("groups", "groups_per_token"):
            integer(f"model.routing.{name}", getattr(self, name), least=1)
        if self.groups_per_token > self.groups:
            raise ConfigError("model.routing.groups_per_token", self.groups_per_token, f"of groups={self.groups}")
        number("model.routing.scale", self.scale, positive=True)


def one_of(key: str, value: str, allowed: Collection[str]) -> None:
    """Raise `ConfigError` for anything else."""
    if value not in allowed:
        raise ConfigError(key, value, "not supported", allowed)


def integer(key: str, value: object, least: int) -> None:
    """Raise `ConfigError` for what is none, or is below `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(key, value, "must be an integer")
    if value < least:
        raise ConfigError(key, value, "must be positive" if least == 1 else f"must be at least {least}")


def number(key: str, value: object, positive: bool = False) -> None:
    """Raise `ConfigError` for what is none, is not finite, or is below 0 (with `positive`, at 0 too)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(key, value, "must be a number")
    if value < 0 or (positive and value == 0):
        raise ConfigError(key, value, "must be a number above 0" if positive else "must be a number of at least 0")
