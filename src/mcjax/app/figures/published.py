"""What Mooncake's papers print, as far as public data can reproduce it.

"Fig" and "Table" are those of the FAST'25 paper unless stated otherwise. Values of figures were read off the paper's
vector graphics, to about 1 % of the axis.
"""

from __future__ import annotations

TRACES = ("conversation", "synthetic")

TRACE_TABLE = {"conversation": (12_031, 12_035, 343), "synthetic": (3_993, 15_325, 149)}
"""Table 2: requests, mean input tokens, mean output tokens."""

CAPACITIES = (10_000, 100_000, 1_000_000, 2_000_000, 4_000_000, 5_000_000, 8_000_000, 10_000_000, 50_000_000)
"""Fig 9's axis, tokens."""

LRU_HIT_RATES = {
    "conversation": (0.047, 0.075, 0.089, 0.122, 0.217, 0.249, 0.302, 0.328, 0.400),
    "synthetic": (0.002, 0.014, 0.148, 0.237, 0.382, 0.437, 0.547, 0.590, 0.660),
}
"""Fig 9: prefix hits under LRU at `CAPACITIES`."""

MAX_HIT_RATES = {"conversation": 0.403, "synthetic": 0.660}
"""Fig 9 at 100 M tokens and more; Table 2 rounds them to 40 % and 66 %."""

ENDLESS_TOKENS = 100_000_000
"""Fig 9's axis from where on its curves are level."""

KV_BYTES_PER_TOKEN = 320 * 1024
"""LLaMA3-70B, section 5.4.1: 320 KB a token."""

KV_BYTES_128K = 40 * 1024**3
"""Section 5.4.1: 40 GB for 128k tokens."""

TOKENS_PER_TB = 3_000_000
"""Section 5.3.1: 1 TB of DRAM holds about 3 M tokens."""

BREAK_EVEN_BYTES_PER_S = {"a800x8": 6e9, "h800x8": 19e9}
"""Equation 2 and the text after it: from here on, reusing a prefix of 8192 tokens beats computing it."""

PREFILL_S = {
    ("conversation", "no cache"): 1.660,
    ("conversation", "local"): 1.522,
    ("conversation", "global"): 1.062,
    ("synthetic", "no cache"): 2.020,
    ("synthetic", "global"): 0.733,
}
"""Fig 8: prefill GPU seconds a request; vLLM, vLLM with prefix caching, Mooncake; 16 nodes, the split is not stated."""

SAVING = {"conversation": 1.56, "synthetic": 2.76}
"""Fig 8, printed: no cache over Mooncake."""

POOL_PREFILL_S = {"conversation": 1.055, "synthetic": 0.787}
"""Fig 10: the same for the global pool of 10 prefill nodes with 3 M tokens each, output forced to 1."""

POOL_HIT_RATES = {"conversation": 0.377, "synthetic": 0.624}
"""Fig 10: prefix hits there."""

TTFT_S = {"kvcache_centric": 3.07, "cache_aware": 3.58, "least_loaded": 5.27, "random": 19.65}
"""Fig 5: mean time to the first token on the conversation trace, 16 nodes, the split is not stated."""

TRANSFER_GB = (10, 20, 40, 60, 80, 100)
"""The axis of the transfer engine's latency figure (section 5.4.1): 1e9 bytes."""

TRANSFER_S = {
    "a800x8": (0.136, 0.248, 0.472, 0.692, 1.068, 1.124),
    "h800x8": (0.076, 0.125, 0.232, 0.308, 0.391, 0.480),
}
"""That figure's latencies: on 4 x 200 Gbps and on 8 x 400 Gbps network cards."""

TRANSFER_BYTES_PER_S = {"a800x8": 87e9, "h800x8": 190e9}
"""Printed for 40 GB (section 5.4.1)."""

BAR_TRANSFER_S = (0.058, 0.116, 0.232, 0.464, 0.913)
"""Fig 14, no cache: sending a prompt's KV and loading it into the decode GPU; 8k, 16k, 32k, 64k, 128k tokens."""

BAR_CACHED_PREFILL_S = (0.135, 0.226, 0.407, 0.881, 2.329)
"""Fig 14, 95 % of the prompt cached: prefill, for the same prompts."""
