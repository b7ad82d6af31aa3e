"""The shape of a decoder, from which parameters, KV cache and FLOPs are counted. Catalogue: `conf/model/*.yaml`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from mcjax.cost.architecture import ACTIVATIONS, Latent, Rope, Routing
from mcjax.cost.kernels import stored_token_bytes
from mcjax.errors import ConfigError
from mcjax.types import KVFormat, KVGroup

_MAY_BE_ZERO = ("experts", "experts_per_token", "expert_d_ff", "shared_experts", "dense_layers")
QUANTISATIONS = ("none", "int8")
_DTYPES = {4: "float32", 2: "bfloat16"}


@dataclass(frozen=True)
class ModelShape:
    """A Llama-like decoder: grouped-query attention with full context, gated MLP (dense, or experts in every layer).

    Bytes are of one element; `d_ff` is the width of one expert where there are experts (`experts` 0: dense).
    """

    name: str
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    tied_embeddings: bool = False
    dtype_bytes: int = 2
    kv_dtype_bytes: int = 2
    max_context_tokens: int = 131_072
    qk_norm: bool = False
    """Queries and keys are normalised per head (Qwen3): two more vectors of `head_dim` a layer."""
    rope_theta: float = 10_000.0
    """Base of the rotary positions' frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    checkpoint: str = ""
    """Where the weights and the tokenizer are (`docs/models.md`); empty: the built-in ones, random by seed."""
    quantisation: str = "none"
    """Of weights, as they are loaded: `int8`, a scale an output channel; `none`: they keep the model's dtype."""
    family: str = "llama"
    """Which file of `mcjax/models/families` puts the layers together."""
    rope: Rope | None = None
    """None: plain rotary positions of base `rope_theta`."""
    local_rope: Rope | None = None
    """Of layers with a window, if they have their own."""
    layer_windows: tuple[int, ...] = ()
    """Tokens that each layer sees, itself included; 0: all. Empty: all layers see all."""
    attention_bias: bool = False
    """Queries, keys and values have biases."""
    query_scale: float = 0.0
    """Of scores before the softmax; 0: `head_dim ** -0.5`."""
    attention_soft_cap: float = 0.0
    """Scores `x` become `cap * tanh(x / cap)`; 0: they stay."""
    logits_soft_cap: float = 0.0
    sandwich_norms: bool = False
    """What attention and feed-forward give is normalised too (Gemma)."""
    unit_offset_norms: bool = False
    """Norms multiply by `1 + gain` (Gemma)."""
    embedding_scale: float = 1.0
    """Embeddings are multiplied by it, rounded to the model's dtype first."""
    activation: str = "silu"
    expert_d_ff: int = 0
    """Width of one expert, where it is not `d_ff`: then `d_ff` is that of layers without experts."""
    shared_experts: int = 0
    """Experts that every token takes, computed as one of that many times the width."""
    dense_layers: int = 0
    """First layers, which have no experts."""
    routing: Routing = field(default_factory=Routing)
    latent: Latent | None = None
    """Multi-head latent attention; then `kv_heads` equals `heads`, and `head_dim` is that of queries and keys."""

    def __post_init__(self) -> None:
        for declared in fields(self):
            if declared.type != "int":
                continue
            value: object = getattr(self, declared.name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"model.{declared.name}", value, "must be an integer")
            if value < 0 or (value == 0 and declared.name not in _MAY_BE_ZERO):
                raise ConfigError(f"model.{declared.name}", value, "must be positive")
        for name in ("rope_theta", "norm_eps"):
            number: object = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < float("inf"):
                raise ConfigError(f"model.{name}", number, "must be a number above 0")
        object.__setattr__(self, "layer_windows", tuple(self.layer_windows))
        if self.layer_windows and len(self.layer_windows) != self.layers:
            raise ConfigError("model.layer_windows", len(self.layer_windows), f"must be one a layer, {self.layers}")
        if self.activation not in ACTIVATIONS:
            raise ConfigError("model.activation", self.activation, "not supported", ACTIVATIONS)
        if self.quantisation not in QUANTISATIONS:
            raise ConfigError("model.quantisation", self.quantisation, "not supported", QUANTISATIONS)
        if self.heads % self.kv_heads:
            raise ConfigError("model.kv_heads", self.kv_heads, f"must divide model.heads={self.heads}")
        if (self.experts == 0) != (self.experts_per_token == 0) or self.experts_per_token > self.experts:
            raise ConfigError("model.experts_per_token", self.experts_per_token, f"of model.experts={self.experts}")

    def identity(self) -> dict[str, Any]:
        """All that decides what the model computes, for fingerprints: not its name, its limits or where it lies."""
        values = asdict(self)
        for name in ("name", "checkpoint", "max_context_tokens"):
            del values[name]
        return values

    @property
    def dtype(self) -> str:
        """Of weights, activations and KV, as arrays name it. Raises `ConfigError` for bytes that no such dtype has."""
        if self.dtype_bytes not in _DTYPES:
            raise ConfigError("model.dtype_bytes", self.dtype_bytes, "no such dtype here", _DTYPES)
        return _DTYPES[self.dtype_bytes]

    @property
    def rotary(self) -> Rope:
        """Of layers that see everything."""
        return self.rope or Rope(self.rope_theta)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer; None: it sees everything."""
        return tuple(window or None for window in self.layer_windows or (0,) * self.layers)

    @property
    def cache_entries(self) -> int:
        """Vectors that a layer caches of a token and key head: key and value, or one latent that is both."""
        return 1 if self.latent else 2

    @property
    def cache_heads(self) -> int:
        """Key heads, as caches see them."""
        return 1 if self.latent else self.kv_heads

    @property
    def cache_dim(self) -> int:
        """Numbers of one cached vector."""
        return self.latent.cache_dim if self.latent else self.head_dim

    def page_shape(self, page_tokens: int) -> tuple[int, int, int, int, int]:
        """`[L, C, page, Hkv, D]`, the shape of one page as a canonical block."""
        return (self.layers, self.cache_entries, page_tokens, self.cache_heads, self.cache_dim)

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.dense_layers

    @property
    def attention_parameters(self) -> int:
        """Query, key, value and output matrices of one layer."""
        return self.d_model * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Gate, up and down matrices of one layer's MLP, or of one expert."""
        return 3 * self.d_model * self.d_ff

    @property
    def router_parameters(self) -> int:
        return self.d_model * self.experts

    @property
    def head_parameters(self) -> int:
        return self.vocab * self.d_model

    @property
    def parameters(self) -> int:
        """Every weight, as a checkpoint holds it."""
        norms = 2 * self.d_model + (2 * self.head_dim if self.qk_norm else 0)
        mlp = self.mlp_parameters * max(self.experts, 1) + self.router_parameters
        embeddings = self.head_parameters * (1 if self.tied_embeddings else 2)
        return embeddings + self.layers * (self.attention_parameters + mlp + norms) + self.d_model

    @property
    def weight_bytes(self) -> int:
        """As a device holds them."""
        if self.quantisation == "none":
            return self.parameters * self.dtype_bytes
        from mcjax.cost.parameters import parameters, stored_bytes  # which declare those of a shape

        return sum(stored_bytes(parameter, self) for parameter in parameters(self).values())

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return self.layers * stored_token_bytes(self.kv_heads, self.head_dim, self.kv_dtype_bytes)

    def kv_format(self, block_tokens: int, fingerprint: str) -> KVFormat:
        """The one-group layout of a block of `block_tokens` tokens; `fingerprint` names the weights and dtype."""
        return KVFormat(fingerprint, block_tokens, (KVGroup("full", "full", self.kv_bytes_per_token),))

    @classmethod
    def from_hugging_face(
        cls,
        config: Mapping[str, Any],
        name: str = "",
        dtype_bytes: int | None = None,
        kv_dtype_bytes: int | None = None,
        checkpoint: str = "",
        quantisation: str = "none",
    ) -> ModelShape:
        """Read the mapping of a `config.json`: `cost/families` says of which families.

        Raises `ConfigError` for another family, for a missing field, for a value or a field that nothing here serves,
        and for quantised weights of unstated width.
        """
        from mcjax.cost.families import read  # it makes shapes

        shape = read(config, dtype_bytes, kv_dtype_bytes)
        return replace(shape, name=name or shape.name, checkpoint=checkpoint, quantisation=quantisation)

    @classmethod
    def read(
        cls,
        path: str,
        name: str = "",
        dtype_bytes: int | None = None,
        kv_dtype_bytes: int | None = None,
        checkpoint: str = "",
        quantisation: str = "none",
    ) -> ModelShape:
        """`from_hugging_face` of the file at `path` (a `config.json`, or the directory that holds one)."""
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("model.path", path, f"is no readable config.json ({error})") from None
        if not isinstance(config, dict):
            raise ConfigError("model.path", path, "does not hold a JSON object")
        values = cast("dict[str, Any]", config)
        return cls.from_hugging_face(
            values, name or file.resolve().parent.name, dtype_bytes, kv_dtype_bytes, checkpoint, quantisation
        )
