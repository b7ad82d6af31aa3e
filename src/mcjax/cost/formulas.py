"""FLOPs and bytes of a whole decoder's work, as exact integers. What attention takes is counted in `cost/kernels.py`.

A multiply-add is 2 FLOPs. Norms, rotary embedding, softmax and the embedding lookup are not counted (under 1 % at the
sizes of interest). Attention is causal: a token at position p attends to p + 1 tokens, in layers with a window of w to
no more than w. Latent attention is counted in its absorbed form, in which it runs here (DeepSeek-V2, arXiv:2405.04434,
2.1.2): every query meets the cached vectors themselves.
"""

from __future__ import annotations

from math import comb

from mcjax.cost.kernels import pair_flops, visible_pairs
from mcjax.cost.model_shape import ModelShape


def matmul_flops_per_token(model: ModelShape) -> int:
    """Projections, MLP (the chosen experts and the shared) and router of all layers, for one token."""
    experts = model.expert_parameters * (model.experts_per_token + model.shared_experts) + model.router_parameters
    dense_layers = model.layers - model.expert_layers
    mlp = dense_layers * model.dense_parameters + model.expert_layers * experts
    return 2 * (model.layers * model.attention_parameters + mlp)


def head_flops(model: ModelShape) -> int:
    """Logits of one position."""
    return 2 * model.head_parameters


def layer_pair_flops(model: ModelShape) -> int:
    """Scores and weighted values of one query over one key, all heads of one layer."""
    return pair_flops(model.heads, model.cache_dim, model.value_dim)


def attention_flops_per_pair(model: ModelShape) -> int:
    """Scores and weighted values of one query over one key that all layers see, all heads."""
    return model.layers * layer_pair_flops(model)


def prompt_pairs(model: ModelShape, start_tokens: int, length_tokens: int) -> int:
    """Query-key pairs of a chunk of a prompt, summed over layers."""
    context = start_tokens + length_tokens
    return sum(layers * visible_pairs(context, length_tokens, window) for window, layers in model.window_layers)


def step_pairs(model: ModelShape, batch: int, context_tokens: int) -> int:
    """The same of a decode step, summed over layers: each sequence sees its context and its new token.

    Contexts are known by their sum alone, so those of a layer with a window are counted as if all were of one length:
    exact if they are, or if all are within the window or all beyond it; else more than there are.
    """
    attended = context_tokens + batch
    return sum(
        layers * (attended if window is None else min(attended, batch * window))
        for window, layers in model.window_layers
    )


def prefill_flops(model: ModelShape, start_tokens: int, length_tokens: int) -> int:
    """A chunk of `length_tokens` prompt tokens after `start_tokens` that are cached.

    Additive: chunks sum to the whole prompt. The logits of the last position are left out (2e9 of 1e15 FLOPs).
    """
    attention = prompt_pairs(model, start_tokens, length_tokens) * layer_pair_flops(model)
    return length_tokens * matmul_flops_per_token(model) + attention


def decode_flops(model: ModelShape, batch: int, context_tokens: int) -> int:
    """One step of `batch` sequences that hold `context_tokens` in total; each also attends to its new token."""
    per_sequence = matmul_flops_per_token(model) + head_flops(model)
    return batch * per_sequence + step_pairs(model, batch, context_tokens) * layer_pair_flops(model)


def touched_experts(model: ModelShape, tokens: int) -> tuple[int, int]:
    """Expected experts that `tokens` tokens use in one layer, as (numerator, denominator), under uniform routing.

    E (1 - (1 - k/E)^tokens), exact in integers. Real routing is skewed, so this is an upper estimate.
    """
    everyone = model.experts**tokens
    return model.experts * (everyone - (model.experts - model.experts_per_token) ** tokens), everyone


def weight_read_bytes(model: ModelShape, tokens: int) -> int:
    """Weights that a step over `tokens` tokens reads once: all layers and the head; of experts, the touched ones."""
    total = model.layers * model.attention_parameters + model.head_parameters
    total += (model.layers - model.expert_layers) * model.dense_parameters
    if model.experts:
        numerator, denominator = touched_experts(model, min(tokens, 4096))  # by then every expert is in use
        routed = model.expert_parameters * numerator // denominator
        shared = model.expert_parameters * model.shared_experts
        total += model.expert_layers * (routed + shared + model.router_parameters)
    return total * model.matrix_dtype_bytes


def decode_bytes(model: ModelShape, batch: int, context_tokens: int) -> int:
    """Device memory traffic of one decode step: weights, KV of the context, KV of the new tokens."""
    return weight_read_bytes(model, batch) + step_pairs(model, batch, context_tokens) * model.layer_kv_bytes


def collective_bytes_per_token(model: ModelShape, ways: int) -> int:
    """Bytes that each of `ways` tensor-parallel accelerators sends for one token.

    Two all-reduces a layer over the hidden state; a bandwidth-optimal (ring) all-reduce of x bytes sends
    2 (ways - 1) / ways x from each.
    """
    return 4 * model.layers * model.d_model * model.hidden_dtype_bytes * (ways - 1) // ways


def remote_expert_holders(model: ModelShape, ways: int) -> tuple[int, int]:
    """Expected accelerators other than its own that a token's experts lie on, as (numerator, denominator).

    Each of `ways` holds E / ways whole experts; a token takes k different ones with equal odds. None of them is on a
    given accelerator with odds C(E - E / ways, k) / C(E, k). Exact in integers. Real routing is skewed, and the fullest
    accelerator sets the pace, so this is a lower estimate of the time.
    """
    total = comb(model.experts, model.experts_per_token)
    without = comb(model.experts - model.experts // ways, model.experts_per_token)
    return (ways - 1) * (total - without), total


def expert_parallel_bytes_per_token(model: ModelShape, ways: int) -> int:
    """Bytes that each of `ways` accelerators sends for one token when experts lie whole on them.

    Attention stays tensor-parallel and the rest is split by tokens, so its all-reduce is a reduce-scatter and an
    all-gather: together 2 (ways - 1) / ways hidden states a layer. The MLP's all-reduce gives way to two all-to-alls,
    dispatch and combine: a token's hidden state goes once to each accelerator that holds some of its experts, and comes
    back once (1 / ways of the tokens start on each). Sources: GShard (Lepikhin et al. 2020, 3.2: the two all-to-alls),
    DeepSeek-V3 report (3.2.2: a token is sent once to a place, however many of its experts are there), Megatron-Core
    (expert with tensor parallelism needs sequence parallelism).
    """
    holders, total = remote_expert_holders(model, ways)
    hidden_states = 2 * model.expert_layers * ((ways - 1) * total + holders)  # in units of 1 / (ways x total)
    hidden_states += 4 * (model.layers - model.expert_layers) * (ways - 1) * total  # these keep their all-reduces
    return hidden_states * model.d_model * model.hidden_dtype_bytes // (ways * total)
