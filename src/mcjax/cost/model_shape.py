"""The shape of a decoder, from which parameters, KV cache and FLOPs are counted. Catalogue: `conf/model/*.yaml`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from mcjax.cost.architecture import ACTIVATIONS, Latent, Rope, Routing, integer, number, one_of
from mcjax.cost.kernels import stored_token_bytes
from mcjax.errors import ConfigError
from mcjax.types import KVFormat, KVGroup

_MAY_BE_ZERO = ("experts", "experts_per_token", "expert_d_ff", "shared_experts", "dense_layers")
QUANTISATIONS = ("none", "int8")
_DTYPES = {4: "float32", 2: "bfloat16"}


_PARTS = {"rope": Rope, "local_rope": Rope, "routing": Routing, "latent": Latent}


@dataclass(frozen=True)
class ModelShape:
    """A decoder: grouped-query or latent attention, of the whole context or of a window; gated MLP, dense or experts.

    Bytes are of one element; `d_ff` is the width of one expert where there are experts (`experts` 0: dense), unless
    `expert_d_ff` is.
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
    """Where the weights and the tokenizer are (`docs/models-weights.md`); empty: the built-in ones, random by seed."""
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
            if declared.type == "int":
                least = 0 if declared.name in _MAY_BE_ZERO else 1
                integer(f"model.{declared.name}", getattr(self, declared.name), least)
        for name in ("rope_theta", "norm_eps", "embedding_scale"):
            number(f"model.{name}", getattr(self, name), positive=True)
        for name in ("query_scale", "attention_soft_cap", "logits_soft_cap"):
            number(f"model.{name}", getattr(self, name))
        one_of("model.activation", self.activation, ACTIVATIONS)
        object.__setattr__(self, "layer_windows", tuple(self.layer_windows))
        for name, kind in _PARTS.items():
            _from_plain_values(self, name, kind)
        for window in self.layer_windows:
            integer("model.layer_windows", window, least=0)
        if self.layer_windows and len(self.layer_windows) != self.layers:
            raise ConfigError("model.layer_windows", len(self.layer_windows), f"must be one a layer, {self.layers}")
        one_of("model.quantisation", self.quantisation, QUANTISATIONS)
        if self.heads % self.kv_heads:
            raise ConfigError("model.kv_heads", self.kv_heads, f"must divide model.heads={self.heads}")
        self._check_experts()
        if self.latent is not None:
            self._check_latent(self.latent)

    def _check_experts(self) -> None:
        experts, chosen, routing = self.experts, self.experts_per_token, self.routing
        if (experts == 0) != (chosen == 0) or chosen > experts:
            raise ConfigError("model.experts_per_token", chosen, f"of model.experts={experts}")
        for name in ("expert_d_ff", "shared_experts", "dense_layers"):
            if getattr(self, name) and not experts:
                raise ConfigError(f"model.{name}", getattr(self, name), "there are no experts (model.experts=0)")
        if self.dense_layers > self.layers:
            raise ConfigError("model.dense_layers", self.dense_layers, f"of model.layers={self.layers}")
        if experts and experts % routing.groups:
            raise ConfigError("model.routing.groups", routing.groups, f"must divide model.experts={experts}")
        if experts and chosen > experts // routing.groups * routing.groups_per_token:
            problem = f"more than there are in {routing.groups_per_token} of {routing.groups} groups"
            raise ConfigError("model.experts_per_token", chosen, problem)

    def _check_latent(self, latent: Latent) -> None:
        if self.kv_heads != self.heads:
            raise ConfigError("model.kv_heads", self.kv_heads, f"must equal model.heads={self.heads} beside a latent")
        if self.head_dim != latent.nope_dim + latent.rope_dim:
            problem = f"must be the latent's nope_dim + rope_dim, {latent.nope_dim + latent.rope_dim}"
            raise ConfigError("model.head_dim", self.head_dim, problem)
        for name in ("attention_bias", "qk_norm"):
            if getattr(self, name):
                raise ConfigError(f"model.{name}", True, "latent attention has none")

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
    def value_dim(self) -> int:
        """Numbers that a query sums up of what is cached: of latents, what the values are made of."""
        return self.latent.kv_rank if self.latent else self.head_dim

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
    def expert_layers(self) -> int:
        """Layers that have experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @cached_property
    def attention_parameters(self) -> int:
        """Of the matrices of one layer's attention, each of which a token passes once (latents: in absorbed form)."""
        from mcjax.cost.parameters import attention_matrices  # declares them by this class

        return attention_matrices(self)

    @property
    def dense_parameters(self) -> int:
        """Gate, up and down matrices of one layer without experts."""
        return 3 * self.d_model * self.d_ff

    @property
    def expert_parameters(self) -> int:
        """Gate, up and down matrices of one expert."""
        return 3 * self.d_model * (self.expert_d_ff or self.d_ff)

    @property
    def router_parameters(self) -> int:
        return self.d_model * self.experts

    @property
    def head_parameters(self) -> int:
        return self.vocab * self.d_model

    @cached_property
    def parameters(self) -> int:
        """Every weight, as a checkpoint holds it."""
        from mcjax.cost.parameters import parameters  # declares them by this class

        return sum(parameter.size for parameter in parameters(self).values())

    @property
    def matrix_dtype_bytes(self) -> int:
        """Of one number of a matrix: scales of quantised ones, four bytes an output channel, are not counted."""
        return self.dtype_bytes if self.quantisation == "none" else 1

    @cached_property
    def weight_bytes(self) -> int:
        """As a device holds them, scales of quantised ones included."""
        from mcjax.cost.parameters import parameters, stored_bytes  # which declare those of a shape

        return sum(stored_bytes(parameter, self) for parameter in parameters(self).values())

    @property
    def hidden_dtype_bytes(self) -> int:
        """Of one number of the hidden state, which is two bytes wide where weights are narrower."""
        return max(self.dtype_bytes, 2)

    @property
    def layer_kv_bytes(self) -> int:
        """What one layer caches of a token."""
        return stored_token_bytes(self.cache_heads, self.cache_dim, self.kv_dtype_bytes, entries=self.cache_entries)

    @property
    def kv_bytes_per_token(self) -> int:
        """What all layers cache of a token, as blocks hold it: whether a layer's window is over or not."""
        return self.layers * self.layer_kv_bytes

    @cached_property
    def window_layers(self) -> tuple[tuple[int | None, int], ...]:
        """How many layers have each window, those that see everything (None) first, then by width."""
        counts = Counter(self.windows)
        return tuple(sorted(counts.items(), key=lambda entry: entry[0] or 0))

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Layers that cache alike: `latent`, or `full` and `window` (of several widths: `window512`, ...)."""
        if self.latent:
            return (KVGroup("latent", "latent", self.kv_bytes_per_token),)
        groups: list[KVGroup] = []
        several = sum(window is not None for window, _ in self.window_layers) > 1
        for window, layers in self.window_layers:
            if window is None:
                groups.append(KVGroup("full", "full", layers * self.layer_kv_bytes))
            else:
                name = f"window{window}" if several else "window"
                groups.append(KVGroup(name, "window", layers * self.layer_kv_bytes, window_tokens=window))
        return tuple(groups)

    def kv_bytes(self, context_tokens: int) -> int:
        """What the next token needs of a context: of layers with a window, no more than that of its last tokens."""
        return sum(group.bytes_per_token * group.visible(context_tokens) for group in self.kv_groups)

    def kv_format(self, block_tokens: int, fingerprint: str) -> KVFormat:
        """The layout of a block of `block_tokens` tokens; `fingerprint` names the weights and dtype."""
        return KVFormat(fingerprint, block_tokens, self.kv_groups)

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
        checkpoint: str | None = None,
        quantisation: str = "none",
    ) -> ModelShape:
        """`from_hugging_face` of the file at `path` (a `config.json`, or the directory that holds one).

        `checkpoint` None: the directory's weights, if it has any. Raises `ConfigError` too for weights that only torch
        reads.
        """
        file = Path(path).expanduser()
        file = file / "config.json" if file.is_dir() else file
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError("model.path", path, f"is no readable config.json ({error})") from None
        if not isinstance(config, dict):
            raise ConfigError("model.path", path, "does not hold a JSON object")
        values = cast("dict[str, Any]", config)
        if checkpoint is None:
            checkpoint = weights_beside(file)
        return cls.from_hugging_face(
            values, name or file.parent.resolve().name, dtype_bytes, kv_dtype_bytes, checkpoint, quantisation
        )


def _from_plain_values(shape: ModelShape, name: str, kind: type[Any]) -> None:
    """A part that was given as a mapping: a config says it so, and so does another process."""
    value: object = getattr(shape, name)
    if not isinstance(value, Mapping):
        return
    given = cast("Mapping[str, Any]", value)
    known = [declared.name for declared in fields(kind)]
    if odd := [key for key in given if key not in known]:
        raise ConfigError(f"model.{name}.{odd[0]}", given[odd[0]], "there is no such key", known)
    object.__setattr__(shape, name, kind(**given))


def weights_beside(config: Path) -> str:
    """The directory of a `config.json` that has weights; "" if it has none."""
    folder = config.parent.resolve()  # of the name, not of the file: caches of the hub link to blobs elsewhere
    names = sorted(file.name for file in folder.iterdir())
    if any(name == "mcjax.json" or name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return str(folder)
    for name in names:
        if name.endswith((".bin", ".pth", ".pt", ".gguf")):
            fix = "model=gguf reads those" if name.endswith(".gguf") else "save the model as safetensors"
            raise ConfigError("model.path", folder, f"has {name} and no safetensors: {fix}, or say model.checkpoint=''")
    return ""
