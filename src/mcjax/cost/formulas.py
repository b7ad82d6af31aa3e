"""FLOPs and bytes of a decoder's work, as exact integers. The one place that counts them.

A multiply-add is 2 FLOPs. Norms, rotary embedding, softmax and the embedding lookup are not counted (under 1 % at the
sizes of interest). Attention is causal: a token at position p attends to p + 1 tokens.
"""

from __future__ import annotations

from mcjax.cost.model_shape import ModelShape


def matmul_flops_per_token(model: ModelShape) -> int:
    """Projections, MLP (the chosen experts) and router of all layers, for one token."""
    mlp = model.mlp_parameters * max(model.experts_per_token, 1) + model.router_parameters
    return 2 * model.layers * (model.attention_parameters + mlp)


def head_flops(model: ModelShape) -> int:
    """Logits of one position."""
    return 2 * model.head_parameters


def attention_flops_per_pair(model: ModelShape) -> int:
    """Scores and weighted values of one query over one key, all layers and heads."""
    return 4 * model.layers * model.heads * model.head_dim


def attention_pairs(start_tokens: int, length_tokens: int) -> int:
    """Query-key pairs of `length_tokens` queries after a prefix of `start_tokens`."""
    return length_tokens * start_tokens + length_tokens * (length_tokens + 1) // 2


def prefill_flops(model: ModelShape, start_tokens: int, length_tokens: int) -> int:
    """A chunk of `length_tokens` prompt tokens after `start_tokens` that are cached.

    Additive: chunks sum to the whole prompt. The logits of the last position are left out (2e9 of 1e15 FLOPs).
    """
    pairs = attention_pairs(start_tokens, length_tokens)
    return length_tokens * matmul_flops_per_token(model) + pairs * attention_flops_per_pair(model)


def decode_flops(model: ModelShape, batch: int, context_tokens: int) -> int:
    """One step of `batch` sequences that hold `context_tokens` in total; each also attends to its new token."""
    per_sequence = matmul_flops_per_token(model) + head_flops(model)
    return batch * per_sequence + (context_tokens + batch) * attention_flops_per_pair(model)


def touched_experts(model: ModelShape, tokens: int) -> tuple[int, int]:
    """Expected experts that `tokens` tokens use in one layer, as (numerator, denominator), under uniform routing.

    E (1 - (1 - k/E)^tokens), exact in integers. Real routing is skewed, so this is an upper estimate.
    """
    everyone = model.experts**tokens
    return model.experts * (everyone - (model.experts - model.experts_per_token) ** tokens), everyone


def weight_read_bytes(model: ModelShape, tokens: int) -> int:
    """Weights that a step over `tokens` tokens reads once: all layers and the head; of experts, the touched ones."""
    if model.experts:
        numerator, denominator = touched_experts(model, min(tokens, 4096))  # by then every expert is in use
        mlp = model.mlp_parameters * numerator // denominator
    else:
        mlp = model.mlp_parameters
    layer = model.attention_parameters + mlp + model.router_parameters
    return (model.layers * layer + model.head_parameters) * model.dtype_bytes


def decode_bytes(model: ModelShape, batch: int, context_tokens: int) -> int:
    """Device memory traffic of one decode step: weights, KV of the context, KV of the new tokens."""
    return weight_read_bytes(model, batch) + (context_tokens + batch) * model.kv_bytes_per_token


def collective_bytes_per_token(model: ModelShape, ways: int) -> int:
    """Bytes that each of `ways` tensor-parallel accelerators sends for one token.

    Two all-reduces a layer over the hidden state; a bandwidth-optimal (ring) all-reduce of x bytes sends
    2 (ways - 1) / ways x from each.
    """
    return 4 * model.layers * model.d_model * model.dtype_bytes * (ways - 1) // ways
