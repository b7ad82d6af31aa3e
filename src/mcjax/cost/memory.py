"""How many tokens of KV cache fit into an instance's device memory beside the weights."""

from __future__ import annotations

from mcjax.cost.hardware import Hardware
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError


def activation_bytes(model: ModelShape, ways: int, chunk_tokens: int) -> int:
    """Working memory of one prefill chunk over `ways` accelerators. An estimate; a real engine should measure its own.

    Residual, norm and attention output are on every accelerator; the projections of one layer and 256 f32 rows of
    logits are split over all. Of latents, queries and results are as wide as what is cached.
    """
    replicated = 3 * model.d_model * ways
    projections = (model.heads + 2 * model.kv_heads) * model.head_dim
    if latent := model.latent:
        projections = latent.query_rank + model.heads * (model.head_dim + 2 * latent.cache_dim) + latent.cache_dim
    expert = model.expert_parameters * (model.experts_per_token + model.shared_experts)
    mlp = max(expert, model.dense_parameters if model.expert_layers < model.layers else 0) // model.d_model
    return chunk_tokens * (replicated + projections + mlp) * model.hidden_dtype_bytes + 4 * model.vocab * 256


def kv_capacity_tokens(
    model: ModelShape,
    hardware: Hardware,
    memory_share: float = 0.9,
    activations: int | None = None,
    chunk_tokens: int = 8192,
) -> int:
    """Tokens of KV that one instance holds: (memory x share - weights - activations) // KV bytes a token.

    `memory_share` leaves room for the runtime, fragmentation and what else lives on the device. `activations` in bytes;
    None takes `activation_bytes` of a chunk of `chunk_tokens`. Raises `ConfigError` when the weights leave no room.
    """
    if not 0 < memory_share <= 1:
        raise ConfigError("memory_share", memory_share, "must be above 0 and at most 1")
    if activations is None:
        activations = activation_bytes(model, hardware.count, chunk_tokens)
    usable = int(hardware.total_hbm_bytes * memory_share)
    room = usable - model.weight_bytes - activations
    if room < model.kv_bytes_per_token:
        raise ConfigError(
            "model",
            model.name,
            f"does not fit on hardware={hardware.name}: weights {model.weight_bytes:,} B and activations "
            f"{activations:,} B leave no room for KV in {usable:,} B ({memory_share:g} of {hardware.count} x "
            f"{hardware.hbm_bytes:,} B); take larger hardware, a smaller model or fewer bytes a weight",
        )
    return room // model.kv_bytes_per_token
