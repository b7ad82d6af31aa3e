"""What `gpu_kernels.py` found, as tables, each target beside what was reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_kernels_cases import CUDNN, MCJAX
from tables import table

from mcjax.cost.kernel_cases import KernelCase

DECODE_OF_COPY, PACK_OF_COPY, PREFILL_OF_CUDNN, PREFILL_FLOPS_PER_S = 0.85, 0.80, 0.80, 500e12
DECODE_CONTEXT, DECODE_BATCH, PREFILL_TOKENS = 4096, 32, 16_384
"""Where the targets hold: decode from these on, prefill of so many tokens, causal, heads of 128."""


def tables(part: Mapping[str, Any]) -> str:
    """Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in part["versions"].items())
    head = f"{part['device']}, {part['date']}, {versions}: {part['state']}"
    if part["interpreted"]:
        head += ". Interpreted: the times say nothing"
    peaks = part["peaks"]
    if peaks and not part["interpreted"]:
        head += (
            f"\n\nMeasured: copy {peaks['copy_bytes_per_s'] / 1e9:,.4g} GB/s, matmul "
            f"{peaks['matmul_flops_per_s'] / 1e12:,.3g} TFLOP/s ({peaks['matmul_dtype']}); "
            f"a turn of an empty loop takes {peaks['turn_s'] * 1e6:,.2g} us."
        )
    parts = [head + "\n", _numerics(part["checks"]), _timings(part), _targets(part)]
    return "\n".join(one for one in parts if one)


def _numerics(checks: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            f"{one['kernel']}, {one['sizes']}",
            one["implementation"],
            one["note"] or ", ".join(f"{name} {found:.1e}" for name, found in one["found"].items()),
            (one["note"] and "-") or ("yes" if one["fine"] else "NO"),
        )
        for one in checks
    ]
    return table(("numbers against the reference", "by", "difference", "within bounds"), rows) if rows else ""


def _timings(part: Mapping[str, Any]) -> str:
    rows: list[tuple[str, ...]] = []
    for one in part["timings"]:
        case = KernelCase.of_values(one["case"])
        cost = case.cost()
        quantised = "" if case.kv_dtype == case.dtype else f", {case.kv_dtype}"
        name = f"{case.kernel}, {case.text()}{quantised}"
        if part["interpreted"]:
            rows.append((name, one["implementation"], "interpreted", "", "", "", ""))
            continue
        rate, share = _rate(cost.flops if case.kernel == "prefill" else 0, cost.bytes, one["seconds"], part["peaks"])
        spread = f"{one['spread_s'][0] * 1e6:,.1f} to {one['spread_s'][1] * 1e6:,.1f}"
        busy = "" if one.get("busy") is None else f"{one['busy']:.0%}"
        rows.append((name, one["implementation"], f"{one['seconds'] * 1e6:,.1f}", spread, rate, share, busy))
    rows += [
        (f"{one['kernel']}, {one['sizes']}", one["implementation"], one["note"], "", "", "", "")
        for one in part["absent"]
    ]
    if not rows:
        return ""
    head = ("call", "by", "us, median", "least to most", "rate", "of copy or matmul", "device busy")
    return table(head, rows)


def _rate(flops: int, nbytes: int, seconds: float, peaks: Mapping[str, float]) -> tuple[str, str]:
    if flops:
        share = f"{flops / seconds / peaks['matmul_flops_per_s']:.0%}" if peaks else ""
        return f"{flops / seconds / 1e12:,.3g} TFLOP/s", share
    share = f"{nbytes / seconds / peaks['copy_bytes_per_s']:.0%}" if peaks else ""
    return f"{nbytes / seconds / 1e9:,.4g} GB/s", share


def targets(part: Mapping[str, Any]) -> list[tuple[str, float, float | None]]:
    """(what, target, the worst of what was measured or None) of mcjax's dispatch."""
    copy, pack, cudnn, flops = [], [], [], []
    timings = [(KernelCase.of_values(one["case"]), one["implementation"], one["seconds"]) for one in part["timings"]]
    theirs = {case: seconds for case, name, seconds in timings if name == CUDNN}
    for case, name, seconds in timings:
        if name != MCJAX or not part["peaks"]:
            continue
        cost = case.cost()
        of_copy = cost.bytes / seconds / part["peaks"]["copy_bytes_per_s"]
        if case.kernel == "decode":
            if all(count >= DECODE_BATCH and before >= DECODE_CONTEXT for count, before, _ in case.sequences):
                copy.append(of_copy)
        elif case.kernel == "prefill":
            if case.sequences == ((1, 0, PREFILL_TOKENS),) and case.kv_dtype == case.dtype and case.head_dim == 128:
                flops.append(cost.flops / seconds)
                if case in theirs:
                    cudnn.append(theirs[case] / seconds)
        elif not case.block_dtype:
            pack.append(of_copy)
    found = (
        (f"decode, of copy bandwidth (batch >= {DECODE_BATCH}, context >= {DECODE_CONTEXT:,})", DECODE_OF_COPY, copy),
        (f"prefill of {PREFILL_TOKENS:,} tokens, times cuDNN", PREFILL_OF_CUDNN, cudnn),
        (f"prefill of {PREFILL_TOKENS:,} tokens, FLOP/s", PREFILL_FLOPS_PER_S, flops),
        ("pack and unpack as stored, of copy bandwidth", PACK_OF_COPY, pack),
    )
    return [(what, target, min(values) if values else None) for what, target, values in found]


def _targets(part: Mapping[str, Any]) -> str:
    if part["interpreted"] or part["accelerator"] == "CPU":
        return ""
    rows = [
        (what, f"{target:,.3g}", "open" if worst is None else f"{worst:,.3g}", _told(target, worst))
        for what, target, worst in targets(part)
    ]
    return table(("target", "at least", "the least measured", "reached"), rows)


def _told(target: float, worst: float | None) -> str:
    return "" if worst is None else "yes" if worst >= target else "no"
