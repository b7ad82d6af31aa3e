"""The figures that follow from formulas, the cost model and the traces' columns alone: nothing is simulated."""

from __future__ import annotations

from math import fsum

from mcjax.app.figures import published
from mcjax.app.figures.row import Row
from mcjax.cost.catalogue import fitted, hardware, model
from mcjax.cost.fit import fit_decode
from mcjax.cost.published import A800_DECODE_128_S, A800_PREFILL_S, CONTEXT_TOKENS
from mcjax.types import NS_PER_S
from mcjax.workload.mooncake_file import Rows

MB = 10**6
SCHEDULE_S = 0.045
"""Fig 14's first part, 0.04 to 0.05 s: taken as it is, nothing here models it."""


def trace_rows(name: str, rows: Rows) -> list[Row]:
    """A1: requests and mean lengths."""
    count = len(rows)
    ours = (count, sum(rows.input_tokens) / count, sum(rows.output_tokens) / count)
    what = ("requests", "mean input", "mean output")
    return [
        Row("A1", f"{name}: {label}", value, round(mine), unit)
        for label, value, mine, unit in zip(
            what, published.TRACE_TABLE[name], ours, ("", "tokens", "tokens"), strict=True
        )
    ]


def kv_rows() -> list[Row]:
    """A4: KV bytes of LLaMA3-70B."""
    per_token = model("llama3-70b").kv_bytes_per_token
    in_pool = hardware("a800x8").host_dram_bytes / per_token
    return [
        Row("A4", "KV of a token", published.KV_BYTES_PER_TOKEN / 1024, per_token / 1024, "KiB"),
        Row("A4", "KV of 128k tokens", published.KV_BYTES_128K / 2**30, 131_072 * per_token / 2**30, "GiB"),
        Row("A4", "tokens in 1 TB of DRAM", published.TOKENS_PER_TB / 1e6, in_pool / 1e6, "M", 'printed as "about"'),
    ]


def break_even_bytes_per_s(machine: str, prefix_tokens: int = 8192) -> float:
    """Equation 2: the bandwidth at which loading a prefix takes as long as computing it at the machine's peak.

    Of a layer, a prefix of p tokens has 2 p d s / q bytes (width d, s bytes an element, q query heads for a KV head)
    and takes a p^2 d + b p d^2 FLOPs with the paper's a = 4, b = 22.
    """
    shape = model("llama3-70b")
    layer_bytes = shape.kv_bytes_per_token / shape.layers * prefix_tokens
    layer_flops = 4 * prefix_tokens**2 * shape.d_model + 22 * prefix_tokens * shape.d_model**2
    return layer_bytes / (layer_flops / hardware(machine).total_peak_flops)


def break_even_rows() -> list[Row]:
    """A5."""
    why = {"a800x8": "", "h800x8": "the paper does not print the H800's peak; 989 TFLOP/s is the H100 datasheet's"}
    return [
        Row("A5", f"break-even bandwidth, {name}", value / 1e9, break_even_bytes_per_s(name) / 1e9, "GB/s", why[name])
        for name, value in published.BREAK_EVEN_BYTES_PER_S.items()
    ]


def prefill_rows() -> list[Row]:
    """A6: a prompt alone, nothing cached."""
    cost = fitted()
    return [
        Row("A6", f"prefill of {tokens:,}", seconds, cost.prefill_ns(0, tokens) / NS_PER_S, "s")
        for tokens, seconds in zip(CONTEXT_TOKENS, A800_PREFILL_S, strict=True)
    ]


def no_cache_row(name: str, rows: Rows) -> Row:
    """A7 (conversation) and the first half of A9 (synthetic): prefill GPU time of the mean request, no cache."""
    cost = fitted()
    mean_s = sum(cost.prefill_ns(0, tokens) for tokens in rows.input_tokens) / NS_PER_S / len(rows)
    anchor, why = ("A7", "") if name == "conversation" else ("A9", NO_CACHE_SYNTHETIC)
    return Row(anchor, f"{name}: prefill, no cache", published.PREFILL_S[name, "no cache"], mean_s, "s/request", why)


NO_CACHE_SYNTHETIC = (
    "not a matter of policy: A6's curve summed over the published lengths gives this. The paper measured vLLM; on the "
    "conversation trace the same sum agrees within 0.2 %"
)


def transfer_rows() -> list[Row]:
    """A13: latency t = t0 + bytes / rate, fitted to each curve by least squares of relative errors."""
    rows: list[Row] = []
    for name, curve in published.TRANSFER_S.items():
        sizes = [gigabytes * 1000 for gigabytes in published.TRANSFER_GB]  # MB, so that the slope is a whole number
        start_ns, _, ps_per_mb = fit_decode([1] * len(sizes), sizes, curve)
        rate = MB / (ps_per_mb / 1e12)
        printed = published.TRANSFER_BYTES_PER_S[name]
        at_40 = 40e9 / (start_ns / NS_PER_S + 40e9 / rate)
        errors = [
            (start_ns / NS_PER_S + size * MB / rate) / seconds - 1 for size, seconds in zip(sizes, curve, strict=True)
        ]
        worst = max(range(len(errors)), key=lambda index: abs(errors[index]))
        why = (
            f"fit: {start_ns / 1e6:.0f} ms + bytes / {rate / 1e9:.1f} GB/s; "
            f"largest error {100 * errors[worst]:+.1f} % at {published.TRANSFER_GB[worst]} GB"
        )
        rows.append(Row("A13", f"40 GB by the fit, {name}", printed / 1e9, at_40 / 1e9, "GB/s", why))
        link = 40e9 / (hardware(name).transfer_ns(40 * 10**9) / NS_PER_S)
        rows.append(Row("A13", f"40 GB by our link model, {name}", printed / 1e9, link / 1e9, "GB/s", LINK))
    return rows


LINK = "the link has the printed rate and 5 us of latency: what it takes for small messages is an assumption"


def bar_rows() -> list[Row]:
    """Fig 14 without cache: each prompt's parts and their sum, then prefill with 95 % cached (reported only)."""
    cost, machine, shape = fitted(), hardware("a800x8"), model("llama3-70b")
    rows: list[Row] = []
    for index, tokens in enumerate(CONTEXT_TOKENS):
        nbytes = tokens * shape.kv_bytes_per_token
        prefill_s = cost.prefill_ns(0, tokens) / NS_PER_S
        moved_s = (machine.transfer_ns(nbytes) + machine.transfer_ns(nbytes, "pcie")) / NS_PER_S
        decode_s = int(cost.step_ns(1, tokens, 128).sum()) / NS_PER_S
        bars = (A800_PREFILL_S[index], published.BAR_TRANSFER_S[index], A800_DECODE_128_S[index])
        label = f"{tokens // 1024}k, no cache"
        rows += [
            Row("Fig 14", f"{label}: prefill", bars[0], prefill_s, "s"),
            Row("Fig 14", f"{label}: transfer and load", bars[1], moved_s, "s", BAR_TRANSFER),
            Row("Fig 14", f"{label}: decode of 128", bars[2], decode_s, "s"),
            Row(
                "Fig 14",
                f"{label}: whole bar",
                SCHEDULE_S + fsum(bars),
                SCHEDULE_S + fsum((prefill_s, moved_s, decode_s)),
                "s",
            ),
        ]
    for tokens, seconds in zip(CONTEXT_TOKENS, published.BAR_CACHED_PREFILL_S, strict=True):
        cached = tokens * 95 // 100
        mine = cost.prefill_ns(cached, tokens - cached) / NS_PER_S
        rows.append(Row("Fig 14", f"{tokens // 1024}k, 95 % cached: prefill", seconds, mine, "s", BAR_CACHED))
    return rows


BAR_TRANSFER = (
    "87 GB/s of network, then the 128 GB/s that the paper models for host to device; its bars fit a load at about "
    "100 GB/s"
)
BAR_CACHED = (
    "does not follow from the paper's parameters: it contains loading the cached KV, and a floor of the few tokens "
    "that are computed, which a n + b n^2 lacks"
)
