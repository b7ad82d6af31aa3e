"""Timings that others published or modelled, to fit cost models to and to report their errors against.

"read off" values come from the vector graphics of the papers, to about 1 % of the axis.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcjax.cost.fit import fit_decode
from mcjax.cost.model_shape import ModelShape

CONTEXT_TOKENS = (8192, 16384, 32768, 65536, 131072)

A800_PREFILL_S = (1.002, 2.056, 4.479, 10.588, 27.514)
"""LLaMA3-70B on 8 x A800, one prompt of `CONTEXT_TOKENS`, empty cache. FAST'25 Fig 14(a), read off."""

A800_DECODE_128_S = (3.394, 3.433, 3.522, 3.659, 3.939)
"""128 tokens at batch 1 after a prompt of `CONTEXT_TOKENS`, same system. FAST'25 Fig 14, read off."""

DECODE_SHAPE_8K = (
    0.8015, 0.8016, 0.8019, 0.8261, 0.8322, 0.8405, 0.8612, 0.8764,
    0.8906, 0.9183, 0.9359, 0.9379, 0.9598, 1.000, 0.992, 0.995,
)  # fmt: skip
"""Decode step at 8k context a sequence, batch 1 to 16, normalised. Report (arXiv 2407.00079v3) Fig 2, read off."""

BATCH_16_RATIO = 1.24
"""The same figure's ratio of batch 16 to batch 1."""


def a800_decode_constants() -> tuple[int, int, int]:
    """(`decode_base_ns`, `decode_ns_per_sequence`, `decode_ps_per_context_token`) of `conf/cost/fitted.yaml`.

    1. Fig 14 at batch 1 gives the slope over context and what is left, base + one sequence: least squares of relative
       errors over the mean step of 128, whose mean context is the prompt plus 63.5 tokens.
    2. The report's Fig 2 says how much longer a step of 16 sequences with 8k each is: x1.24. Fifteen more contexts of
       8k explain a part of it by the slope; the rest, divided by fifteen, is the cost of a sequence.
    """
    # Doubled, so that the mean context stays whole.
    contexts = [2 * tokens + 127 for tokens in CONTEXT_TOKENS]
    alone_ns, _, half_slope_ps = fit_decode([1] * 5, contexts, [seconds / 128 for seconds in A800_DECODE_128_S])
    slope_ps = 2 * half_slope_ps
    step_ns = alone_ns + 8192 * slope_ps / 1000
    per_sequence_ns = round((step_ns * (BATCH_16_RATIO - 1) - 15 * 8192 * slope_ps / 1000) / 15)
    return alone_ns - per_sequence_ns, per_sequence_ns, slope_ps


@dataclass(frozen=True)
class ModelledTiming:
    """aiconfigurator 0.12.0 in SILICON mode (a model over measured operators, not a measurement of an engine).

    `prefill_ms`: one prompt of 8,192 tokens; `decode_ms`: a step of 64 sequences of 8,192 tokens.
    """

    model: str
    hardware: str
    ways: int
    backend: str
    prefill_ms: float
    decode_ms: float


AICONFIGURATOR = (
    ModelledTiming("llama3-70b", "h100x8", 4, "trtllm", 545, 32.3),
    ModelledTiming("llama3-70b", "h100x8", 4, "vllm", 577, 30.8),
    ModelledTiming("llama3-70b", "h100x8", 4, "sglang", 574, 31.7),
    ModelledTiming("llama3-70b", "h200x8", 4, "vllm", 543, 23.5),
    ModelledTiming("qwen3-32b", "h100x8", 2, "vllm", 476, 37.7),
    ModelledTiming("qwen3-32b", "h100x8", 8, "vllm", 172, 12.8),
)

AICONFIGURATOR_CHUNKS_MS = ((0, 2048, 130.0), (6144, 2048, 142.0))
"""(start, length, milliseconds): LLaMA3-70B on 4 x H100, vllm. Not used in any fit."""

QWEN3_30B_A3B = ModelShape(
    "qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151936,
    experts=128, experts_per_token=8, max_context_tokens=40960, qk_norm=True,
)  # fmt: skip
"""Source: Qwen/Qwen3-30B-A3B config.json."""

AICONFIGURATOR_EXPERTS_MS = ((False, 76.7, 12.7), (True, 85.5, 13.3))
"""(expert parallel, prefill of 8192, decode step of 64 x 8192), milliseconds: Qwen3-30B-A3B on 4 x H100, vllm.

From aiconfigurator-core 0.12.0, `predict_prefill_latency(1, 8192)` and `decode_step_latency(64, 8192, 2)` of an engine
with `tp_size=4` and `moe_tp_size=4` or `moe_ep_size=4`. Not used in any fit. The other backends say 73.6 and 99.1
(sglang), 85.5 and 73.1 (trtllm) for the prefill.
"""

SMOLLM2_135M = ModelShape(
    "smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152,
    tied_embeddings=True, dtype_bytes=4, kv_dtype_bytes=4, max_context_tokens=8192,
)  # fmt: skip
"""Source: HuggingFaceTB/SmolLM2-135M-Instruct config.json."""

CPU_PREFILL_512_S = 512 / 302
"""SmolLM2-135M in f32, jitted JAX, 302 tokens/s. Measured, AMD EPYC Zen 4, two virtual CPUs. Not used in any fit."""

CPU_DECODE_MS = ((1, 31.0), (8, 95.0))
"""(batch, milliseconds a step), same model and machine, contexts of about 64 tokens."""
