"""Values that exclude each other. Nothing that is asked for is silently left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from mcjax.app.runner import read_changes
from mcjax.engine.cluster_spec import parse_cluster
from mcjax.errors import ConfigError
from mcjax.track.flat import flat, text_of

UNREAD_BY_CHECK = (
    *("cluster", "cluster_changes", "slices", "slice", "engine", "transfer", "kernels", "launcher"),
    *("hardware", "model", "cost", "workload", "slo"),
    *("kvpool.block_tokens", "kvpool.dram_bytes"),
    *("sched.report_period_s", "sched.view_delay_s", "sched.attempts"),
    *("track.warmup_s", "track.sample_period_s"),
)
"""Keys and sections that `backend=check` has no use for: its schedules draw sizes, traffic and clusters by seed."""

UNREAD_PLUGINS = ("workload", "cost", "slo")
"""Strategies that it has no use for either."""

SIZES_OF_A_MEASURED_MACHINE = ("chunk_tokens", "max_batch", "memory_share")
MEASURED = "mcjax.cost.measured.read"


def check_together(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first values that exclude each other. `config` is plain, and of the right kinds."""
    read_changes(config["cluster_changes"], parse_cluster(config["cluster"]))
    _slices(config)
    _only_of_one_world(config)
    world = config["backend"]["name"]
    if world == "jax":
        _real(config)
    if world == "sim":
        _simulated(config)
    if world == "check":
        _checked(config)
    if (
        config["engine"]["preemption"] == "recompute"
        and config["engine"]["headroom_tokens"] is None
        and world != "check"
    ):
        problem = "nobody has to make room where engine.headroom_tokens=null takes all pages beforehand"
        raise ConfigError("engine.preemption", "recompute", f"{problem}; give engine.headroom_tokens a number")


def _slices(config: Mapping[str, Any]) -> None:
    if config["slice"] >= config["slices"]:
        raise ConfigError("slice", config["slice"], f"must be below slices={config['slices']}")


def _only_of_one_world(config: Mapping[str, Any]) -> None:
    world = config["backend"]["name"]
    if config["verify"] and world != "jax":
        raise ConfigError("verify", True, "only the real engine is compared with a colocated one", ["backend=jax"])
    faults = {name: value for name, value in config["faults"].items() if not name.startswith("_") and value}
    if faults and world != "check":
        name, value = next(iter(faults.items()))
        problem = f"backend={world} injects no faults; take backend=check, or faults=none"
        raise ConfigError(f"faults.{name}", value, problem)


def _real(config: Mapping[str, Any]) -> None:
    backend, workload, model = config["backend"], config["workload"], config["model"]
    if config["kvpool"]["dram_bytes"] is not None:
        problem = "sizes simulated pools; the real engine's are sized by backend.pool_blocks"
        raise ConfigError("kvpool.dram_bytes", config["kvpool"]["dram_bytes"], problem, ["null"])
    if backend["numerics"] == "invariant":
        if backend["fused_steps"] != 1:
            raise ConfigError("backend.fused_steps", backend["fused_steps"], "numerics=invariant never fuses", [1])
        for key in ("prefill_widths", "decode_batches"):
            if backend[key] != "auto":
                raise ConfigError(f"backend.{key}", backend[key], "numerics=invariant has one shape", ["auto"])
    drawn, known = workload.get("vocab_size"), model.get("vocab")
    if drawn is not None and known is not None and drawn > known:
        problem = f"draws tokens that model={model.get('name')} does not have"
        raise ConfigError("workload.vocab_size", drawn, problem, [f"1 to {known}"])


def _simulated(config: Mapping[str, Any]) -> None:
    if config["cost"]["_target_"] != MEASURED:
        return
    from mcjax.app.schema.files import default_of

    for name in SIZES_OF_A_MEASURED_MACHINE:
        value = config["backend"][name]
        if value != default_of("backend/sim", name):
            raise ConfigError(
                f"backend.{name}", value, "cost=measured brings the sizes of the engine that was measured"
            )


def _checked(config: Mapping[str, Any]) -> None:
    given = [place for place in UNREAD_PLUGINS if place in config.get("plugins", {})]
    for key, value in [(place, config["plugins"][place]) for place in given] + list(_changed(config)):
        problem = "backend=check has no use for it: its schedules draw sizes, traffic and clusters by seed"
        raise ConfigError(key, text_of(value), f"{problem} (backend.shape fixes a cluster)")


def _changed(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What of the unread keys is not as it is by default."""
    from mcjax.app.compose import compose, plain_of

    usual = flat(plain_of(compose(["backend=check", f"seed={config['seed']}"])))
    for key, value in flat(cast("dict[str, Any]", config)).items():
        unread = any(f"{key}.".startswith(f"{section}.") for section in UNREAD_BY_CHECK)
        if unread and (key not in usual or usual[key] != value):
            yield key.removesuffix("._target_"), value
