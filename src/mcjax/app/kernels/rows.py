"""Each kernel at its sizes: work, limit, what binds it, and what was measured; as values and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mcjax.cost.hardware import Hardware
from mcjax.cost.kernel_cases import KernelCase, Limit, limit
from mcjax.cost.kernel_timings import KernelTiming, KernelTimings
from mcjax.cost.kernels import KernelCost
from mcjax.cost.model_shape import ModelShape

HEADER = ("kernel", "sizes", "calls", "GFLOP", "MB", "FLOP/B", "compute", "memory", "bound by", "achieved")
NOT_MEASURED = "not measured"
PREFIXES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


@dataclass(frozen=True, slots=True)
class Row:
    """One call of one kernel on one device."""

    case: KernelCase
    calls: int
    """Of a whole model: a layer each, or one for all of them."""
    cost: KernelCost
    limit: Limit
    timings: tuple[KernelTiming, ...]
    """Of exactly this case, if any."""

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.cost.flops / self.cost.bytes

    def values(self) -> dict[str, Any]:
        """As JSON: SI units, of one call."""
        return {
            "kernel": self.case.kernel,
            "sizes": self.case.text(),
            "case": self.case.values(),
            "calls": self.calls,
            **asdict(self.cost),
            "bytes": self.cost.bytes,
            "flops_per_byte": self.intensity,
            "compute_s": self.limit.compute_s,
            "memory_s": self.limit.memory_s,
            "limit_s": self.limit.seconds,
            "bound_by": self.limit.bound_by,
            "achieved": [
                {
                    "implementation": timing.implementation,
                    "seconds": timing.seconds,
                    "spread_s": list(timing.spread_s),
                    "of_limit": self.limit.seconds / timing.seconds,
                    "flops_per_s": self.cost.flops / timing.seconds,
                    "bytes_per_s": self.cost.bytes / timing.seconds,
                }
                for timing in self.timings
            ],
        }

    def cells(self) -> tuple[str, ...]:
        """Under `HEADER`."""
        achieved = [
            f"{timing.implementation} {time_text(timing.seconds)}, {self.limit.seconds / timing.seconds:.0%}"
            for timing in self.timings
        ]
        return (
            self.case.kernel,
            self.case.text(),
            f"{self.calls}",
            _number(self.cost.flops / 1e9),
            _number(self.cost.bytes / 1e6),
            _number(self.intensity),
            time_text(self.limit.compute_s),
            time_text(self.limit.memory_s),
            self.limit.bound_by,
            "\n".join(achieved) or NOT_MEASURED,
        )


def rows_of(
    model: ModelShape, hardware: Hardware, cases: Sequence[KernelCase], measured: KernelTimings | None
) -> list[Row]:
    return [
        Row(
            case,
            _calls(model, case),
            case.cost(),
            limit(case.cost(), hardware),
            tuple(measured.of(case)) if measured else (),
        )
        for case in cases
    ]


def _calls(model: ModelShape, case: KernelCase) -> int:
    """Of all layers with that window; a window that the model has nowhere was asked for, of all layers."""
    if case.kernel not in ("prefill", "decode"):
        return 1
    return dict(model.window_layers).get(case.window, model.layers)


def facts(model: ModelShape, hardware: Hardware, cases: Sequence[KernelCase], measured: KernelTimings | None) -> str:
    """What the rows are of, in a few lines."""
    one = cases[0]
    share = "one device" if hardware.count == 1 else f"one of {hardware.count} devices, tensor-parallel"
    kv_heads = f"{one.kv_heads} key head{'' if one.kv_heads == 1 else 's'}"
    lines = [
        f"{model.name} on {hardware.name}, {share}: {one.heads} query and {kv_heads} of {one.head_dim}, {one.dtype};",
        f"pages of {one.page_tokens} tokens, {one.kv_dtype}. Peaks of {hardware.accelerator}: "
        f"{hardware.peak_flops / 1e12:,.4g} TFLOP/s, {hardware.hbm_bytes_per_s / 1e9:,.4g} GB/s; "
        f"they meet at {hardware.peak_flops / hardware.hbm_bytes_per_s:,.3g} FLOPs a byte.",
        "Work and limits are of one call; achieved is the share of the limit that was reached.",
    ]
    if measured:
        versions = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
        lines.append(f"Measured on {measured.device}, {measured.date} ({versions}).")
    return "\n".join(lines)


def time_text(seconds: float) -> str:
    """Three digits and a unit."""
    if seconds == 0:
        return "0"
    unit, name = next(((unit, name) for unit, name in PREFIXES if seconds >= unit * 0.9995), PREFIXES[-1])
    return f"{_number(seconds / unit)} {name}"


def _number(value: float) -> str:
    """Three digits; large ones whole."""
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")
