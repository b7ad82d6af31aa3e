"""Errors of the shipped cost models against published timings, as Markdown: `python -m mcjax.cost.report`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import fsum

from mcjax.cost import formulas, published
from mcjax.cost.base import CostModel
from mcjax.cost.catalogue import fitted, hardware, model
from mcjax.cost.hardware import Hardware
from mcjax.cost.model_shape import ModelShape
from mcjax.cost.roofline import Roofline

MakeRoofline = Callable[[ModelShape, Hardware], Roofline]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _error(predicted: float, published_value: float) -> float:
    return predicted / published_value - 1


def _percent(error: float) -> str:
    return f"{error:+.1%}".replace("%", " %")


def a800_errors(cost: CostModel) -> list[tuple[str, float, float]]:
    """(what, published seconds, predicted seconds) of LLaMA3-70B on 8 x A800."""
    rows: list[tuple[str, float, float]] = []
    for tokens, seconds in zip(published.CONTEXT_TOKENS, published.A800_PREFILL_S, strict=True):
        rows.append((f"prefill {tokens:,}", seconds, cost.prefill_ns(0, tokens) / 1e9))
    for tokens, seconds in zip(published.CONTEXT_TOKENS, published.A800_DECODE_128_S, strict=True):
        rows.append((f"decode 128 after {tokens:,}", seconds, int(cost.step_ns(1, tokens, 128).sum()) / 1e9))
    return rows


def batch_shape_errors(cost: CostModel) -> list[tuple[int, float, float]]:
    """(batch, published, predicted) decode step at 8k context a sequence, both relative to batch 1."""
    first = int(cost.step_ns(1, 8192, 1)[0])
    shape = published.DECODE_SHAPE_8K
    return [
        (batch, value / shape[0], int(cost.step_ns(batch, 8192 * batch, 1)[0]) / first)
        for batch, value in enumerate(shape, start=1)
    ]


def plain_roofline_ms(shape: ModelShape, machine: Hardware) -> tuple[float, float]:
    """Prefill of 8,192 tokens and decode of 64 x 8,192 at 100 % of the peaks, nothing else."""
    prefill_s = formulas.prefill_flops(shape, 0, 8192) / machine.total_peak_flops
    decode_s = formulas.decode_bytes(shape, 64, 64 * 8192) / machine.total_hbm_bytes_per_s
    return prefill_s * 1e3, decode_s * 1e3


def aiconfigurator_rows(make: MakeRoofline) -> list[tuple[published.ModelledTiming, float, float, float, float]]:
    """(timing, prefill ms, decode ms, plain roofline's prefill ms and decode ms)."""
    rows: list[tuple[published.ModelledTiming, float, float, float, float]] = []
    for timing in published.AICONFIGURATOR:
        shape = model(timing.model)
        machine = replace(hardware(timing.hardware), count=timing.ways)
        cost = make(shape, machine)
        prefill_ms = cost.prefill_ns(0, 8192) / 1e6
        decode_ms = int(cost.step_ns(64, 64 * 8192, 1)[0]) / 1e6
        rows.append((timing, prefill_ms, decode_ms, *plain_roofline_ms(shape, machine)))
    return rows


def held_out_rows(make: MakeRoofline) -> list[tuple[str, float, float]]:
    """(what, reference ms, predicted ms) of timings that no constant was fitted to."""
    cost = make(model("llama3-70b"), replace(hardware("h100x8"), count=4))
    rows: list[tuple[str, float, float]] = []
    for start, length, ms in published.AICONFIGURATOR_CHUNKS_MS:
        what = f"llama3-70b, 4 x H100, chunk of {length} after {start} (aiconfigurator)"
        rows.append((what, ms, cost.prefill_ns(start, length) / 1e6))
    four = replace(hardware("h100x8"), count=4)
    for parallel, prefill_ms, decode_ms in published.AICONFIGURATOR_EXPERTS_MS:
        cost = replace(make(published.QWEN3_30B_A3B, four), expert_parallel=parallel)
        setting = f"qwen3-30b-a3b, 4 x H100, experts {'whole' if parallel else 'sliced'}"
        step_ms = int(cost.step_ns(64, 64 * 8192, 1)[0]) / 1e6
        rows.append((f"{setting}, prefill 8k (aiconfigurator)", prefill_ms, cost.prefill_ns(0, 8192) / 1e6))
        rows.append((f"{setting}, decode 64 x 8k (aiconfigurator)", decode_ms, step_ms))
    cost = make(published.SMOLLM2_135M, hardware("cpu"))
    rows.append(
        ("smollm2-135m, cpu, prefill 512 (measured)", published.CPU_PREFILL_512_S * 1e3, cost.prefill_ns(0, 512) / 1e6)
    )
    for batch, ms in published.CPU_DECODE_MS:
        step_ms = int(cost.step_ns(batch, 64 * batch, 1)[0]) / 1e6
        rows.append((f"smollm2-135m, cpu, decode step, batch {batch} (measured)", ms, step_ms))
    return rows


def two_efficiencies(shape: ModelShape, machine: Hardware) -> Roofline:
    """The usual simpler model, for comparison: 0.55 of FLOPs, 0.6 of bytes, free all-reduces, no fixed costs."""
    free = replace(machine, interconnect_bytes_per_s=10**18)
    return Roofline(shape, free, compute_efficiency=0.55, memory_efficiency=0.6, layer_overhead_ns=0)


def _summary(name: str, make: MakeRoofline) -> list[str]:
    rows = aiconfigurator_rows(make)
    a800 = a800_errors(make(model("llama3-70b"), hardware("a800x8")))
    groups = [
        [_error(prefill_ms, timing.prefill_ms) for timing, prefill_ms, *_ in rows],
        [_error(decode_ms, timing.decode_ms) for timing, _, decode_ms, *_ in rows],
        [_error(predicted, seconds) for _, seconds, predicted in a800[:5]],
        [_error(predicted, seconds) for _, seconds, predicted in a800[5:]],
    ]
    cells = [f"{fsum(map(abs, errors)) / len(errors):.1%} / {max(map(abs, errors)):.1%}" for errors in groups]
    return [name, *(cell.replace("%", " %") for cell in cells)]


def render() -> str:
    """The whole report, in Markdown."""
    own = fitted()
    a800_roofline = Roofline(model("llama3-70b"), hardware("a800x8"))
    lines = ["LLaMA3-70B on 8 x A800 (FAST'25 Fig 14), seconds:", ""]
    lines += _table(
        ["", "published", "fitted", "error", "roofline", "error"],
        [
            [
                what, f"{seconds:.3f}",
                f"{mine:.3f}", _percent(_error(mine, seconds)),
                f"{roof:.3f}", _percent(_error(roof, seconds)),
            ]
            for (what, seconds, mine), (_, _, roof) in zip(a800_errors(own), a800_errors(a800_roofline), strict=True)
        ],
    )  # fmt: skip
    shape = batch_shape_errors(own)
    worst = max(shape, key=lambda row: abs(_error(row[2], row[1])))
    lines += [
        f"Decode step of 16 sequences of 8k over one (report, Fig 2): published x{published.BATCH_16_RATIO}, fitted "
        f"x{shape[-1][2]:.3f}; largest error over batch 1 to 16 {_percent(_error(worst[2], worst[1]))} "
        f"at batch {worst[0]}.",
        "",
        'Roofline against aiconfigurator 0.12.0, milliseconds; "ratio" is aiconfigurator over the plain roofline '
        "(100 % of the peaks, nothing else):",
        "",
    ]
    lines += _table(
        [
            "model", "hardware", "backend",
            "prefill 8k", "ratio", "roofline", "error",
            "decode 64 x 8k", "ratio", "roofline", "error",
        ],
        [
            [
                timing.model, f"{timing.ways} x {timing.hardware[:4].upper()}", timing.backend,
                f"{timing.prefill_ms:.0f}", f"{timing.prefill_ms / plain_prefill:.2f}",
                f"{prefill_ms:.0f}", _percent(_error(prefill_ms, timing.prefill_ms)),
                f"{timing.decode_ms:.1f}", f"{timing.decode_ms / plain_decode:.2f}",
                f"{decode_ms:.1f}", _percent(_error(decode_ms, timing.decode_ms)),
            ]
            for timing, prefill_ms, decode_ms, plain_prefill, plain_decode in aiconfigurator_rows(Roofline)
        ],
    )  # fmt: skip
    lines += ["Mean / largest absolute error, by what the roofline contains:", ""]
    lines += _table(
        ["", "aiconfigurator prefill", "aiconfigurator decode", "A800 prefill", "A800 decode"],
        [_summary("default", Roofline), _summary("0.55 / 0.6, no all-reduce, no overhead", two_efficiencies)],
    )
    lines += ["Roofline on timings that nothing was fitted to, milliseconds:", ""]
    lines += _table(
        ["", "reference", "roofline", "error"],
        [[what, f"{ms:.1f}", f"{mine:.1f}", _percent(_error(mine, ms))] for what, ms, mine in held_out_rows(Roofline)],
    )
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(render(), end="")
