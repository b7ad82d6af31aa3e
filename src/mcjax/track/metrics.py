"""The figures that runs are compared by: names are those of `summary.json`, written `ttft_s.p90`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from mcjax.errors import ConfigError
from mcjax.track.flat import flat
from mcjax.types import Miss

Better = Literal["lower", "higher", ""]
"""Which way is good; "" for a count that is neither."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a run. `unit` is s, 1/s, share, B or empty."""

    name: str
    label: str
    unit: str
    better: Better

    def of(self, summary: Mapping[str, Any]) -> float | None:
        """The figure of one run, or None if it has none."""
        value: Any = summary
        for part in self.name.split("."):
            value = cast("Mapping[str, Any]", value).get(part) if isinstance(value, Mapping) else None
        if _is_number(value):
            return float(value)
        return figures(summary).get(self.name) if value is None else None  # a transport's name may have a dot in it


def _spread(name: str, label: str) -> list[Metric]:
    return [Metric(f"{name}.{kind}", f"{label} {kind}", "s", "lower") for kind in ("mean", "p50", "p90", "p99")]


CATALOGUE: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("requests.submitted", "submitted", "", ""),
        Metric("requests.completed", "completed", "", "higher"),
        Metric("requests.rejected", "rejected", "", "lower"),
        Metric("requests.failed", "failed", "", "lower"),
        Metric("requests.cancelled", "cancelled", "", ""),
        Metric("goodput_rps", "goodput", "1/s", "higher"),
        Metric("slo_attainment", "within SLO", "share", "higher"),
        *_spread("ttft_s", "TTFT"),
        *_spread("tbt_s", "TBT"),
        *_spread("tbt_tail_s", "TBT tail"),
        Metric("output_tokens_per_s", "output tokens", "1/s", "higher"),
        Metric("prefix_hit_rate.token", "prefix hits (tokens)", "share", "higher"),
        Metric("prefix_hit_rate.block", "prefix hits (blocks)", "share", "higher"),
        Metric("tokens_by_tier.hbm", "tokens from the device", "", ""),
        Metric("tokens_by_tier.dram_local", "tokens from local DRAM", "", ""),
        Metric("tokens_by_tier.dram_remote", "tokens from remote DRAM", "", ""),
        Metric("tokens_by_tier.ssd", "tokens from SSD", "", ""),
        Metric("tokens_by_tier.computed", "tokens computed", "", "lower"),
        Metric("hit_tokens.available", "tokens cached anywhere", "", ""),
        Metric("hit_tokens.routed", "cached tokens routed to", "", "higher"),
        Metric("hit_tokens.delivered", "cached tokens used", "", "higher"),
        *(Metric(f"missed_tokens.{cause}", f"tokens missed: {cause}", "", "lower") for cause in Miss),
        Metric("prefill_busy_s", "prefill busy", "s", ""),
        Metric("decode_busy_s", "decode busy", "s", ""),
        Metric("decode_during_prefill_share", "decode during prefill", "share", ""),
        Metric("estimate_error.ttft_mape", "TTFT estimate error", "share", "lower"),
        Metric("estimate_error.transfer_mape", "transfer estimate error", "share", "lower"),
        Metric("duration_s", "duration", "s", ""),
        Metric("wall_s", "wall time", "s", ""),
        Metric("peak_rss_bytes", "peak memory", "B", ""),
    )
}

HEADLINE = (
    "requests.submitted",
    "requests.completed",
    "requests.rejected",
    "requests.failed",
    "goodput_rps",
    "slo_attainment",
    "ttft_s.mean",
    "ttft_s.p90",
    "tbt_s.p90",
    "tbt_tail_s.p90",
    "prefix_hit_rate.token",
)
"""What a list of runs shows, and a comparison if nothing else is asked for."""

BESIDE_GOODPUT = ("requests.completed", "requests.rejected", "requests.failed")
"""What stands beside goodput wherever it is shown: a policy that refuses much serves the rest well."""


def metric(name: str) -> Metric:
    """A metric by name. Raises `ConfigError` for an unknown one."""
    if name not in CATALOGUE:
        raise ConfigError("metric", name, "no such metric", CATALOGUE)
    return CATALOGUE[name]


def headline(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """The figures of `HEADLINE`, by name."""
    return {name: CATALOGUE[name].of(summary) for name in HEADLINE}


def figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """Every number of a summary by its flat name, also those that are not in the catalogue."""
    found = flat(summary)
    return {name: float(value) for name, value in found.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
