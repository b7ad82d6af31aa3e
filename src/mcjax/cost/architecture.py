"""The parts in which decoders differ: rotary positions, latent attention, routing. Free of jax."""

from __future__ import annotations

from dataclasses import dataclass

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
