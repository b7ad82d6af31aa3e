"""Values that exclude each other. Nothing that is asked for is silently left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from mcjax.app.runner import all_instances, read_changes
from mcjax.engine.cluster_spec import parse_cluster
from mcjax.errors import ConfigError
from mcjax.kernels.choice import KernelChoice
from mcjax.kvpool.quotas import parse_quotas
from mcjax.track.flat import flat, text_of
from mcjax.types import Role

UNREAD_BY_CHECK = (
    *("cluster", "cluster_changes", "slices", "slice", "engine", "transfer", "kernels", "launcher"),
    *("hardware", "model", "cost", "workload", "slo"),
    *("kvpool.block_tokens", "kvpool.dram_bytes"),
    *("kvpool.hbm_cache", "kvpool.ssd_bytes", "kvpool.ssd_path", "kvpool.tenants"),
    *("kvpool.dram_encoding", "kvpool.ssd_encoding", "kvpool.huge_pages", "kvpool.numa_node"),
    *("sched.report_period_s", "sched.view_delay_s", "sched.attempts"),
    *("track.warmup_s", "track.sample_period_s"),
)
"""Keys and sections that `backend=check` has no use for: its schedules draw sizes, traffic and clusters by seed."""

UNREAD_BY_HITS = (
    *("cluster", "cluster_changes", "slices", "slice", "engine", "transfer", "kernels", "launcher", "workload", "slo"),
    *("kvpool.dram_bytes", "kvpool.hbm_cache", "kvpool.ssd_bytes", "kvpool.ssd_path", "kvpool.encoding"),
    *("kvpool.tenants", "kvpool.tiering", "sched", "track.warmup_s", "track.sample_period_s"),
)
"""Those that `backend=hits` has none for: it replays traces of its own through one pool, and nothing else."""

UNREAD: Mapping[str, tuple[Sequence[str], Sequence[str], str]] = {
    "check": (
        UNREAD_BY_CHECK,
        ("paths", "workload", "cost", "slo"),
        "its schedules draw sizes, traffic and clusters by seed (backend.shape fixes a cluster)",
    ),
    "hits": (
        UNREAD_BY_HITS,
        (
            "prefill",
            "decode",
            "fetch",
            "admission",
            "tenancy",
            "batching",
            "roles",
            "lengths",
            "tiering",
            "paths",
            "workload",
            "slo",
        ),
        "it replays backend.traces through one pool, and nothing else",
    ),
}
"""By world: keys and sections, strategies, and why it has no use for them."""

SIZES_OF_A_MEASURED_MACHINE = ("chunk_tokens", "max_batch", "memory_share")
MEASURED = "mcjax.cost.measured.read"


def check_together(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first values that exclude each other. `config` is plain, and of the right kinds."""
    read_changes(config["cluster_changes"], parse_cluster(config["cluster"]))
    _slices(config)
    parse_quotas(config["kvpool"]["tenants"])
    _only_of_one_world(config)
    world = config["backend"]["name"]
    KernelChoice(**config["kernels"])
    _launcher(config)
    if world != "check":
        _encodings(config)
    if world in ("jax", "sim"):
        _transfer(config, world)
    if world == "jax":
        _real(config)
        _real_ssd(config["kvpool"])
    if world == "sim":
        _simulated(config)
    if world in UNREAD:
        _unread(config, world)
    if (
        config["engine"]["preemption"] == "recompute"
        and config["engine"]["headroom_tokens"] is None
        and world not in UNREAD
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


def _launcher(config: Mapping[str, Any]) -> None:
    launcher, world = config["launcher"]["name"], config["backend"]["name"]
    if launcher == "embedded":
        return
    if world != "jax":
        problem = f"backend={world} computes nothing that would need processes of its own"
        raise ConfigError("launcher", launcher, problem, ["launcher=embedded", "backend=jax"])
    instances = parse_cluster(config["cluster"])
    names = [name for name, _ in all_instances(instances, read_changes(config["cluster_changes"], instances))]
    for key in ("command", "host"):
        for name, value in config["launcher"][key].items():
            if name not in names:
                raise ConfigError(f"launcher.{key}.{name}", text_of(value), "there is no such instance", names)
            if not isinstance(value, str):
                raise ConfigError(f"launcher.{key}.{name}", text_of(value), "must be text")
    if config["kvpool"]["ssd_path"] is not None:
        problem = "processes have no SSD tier yet: take launcher=embedded, or leave kvpool.ssd_path and ssd_bytes out"
        raise ConfigError("kvpool.ssd_path", config["kvpool"]["ssd_path"], problem, ["null"])


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


def _transfer(config: Mapping[str, Any], world: str) -> None:
    transfer = config["transfer"]
    if transfer["backoff_s"] > transfer["most_backoff_s"]:
        problem = f"must not be above transfer.most_backoff_s={transfer['most_backoff_s']:g}"
        raise ConfigError("transfer.backoff_s", transfer["backoff_s"], problem)
    if world == "jax" and transfer["topology"] is not None:
        problem = "describes simulated NICs; real ones are found by their transports"
        raise ConfigError("transfer.topology", text_of(transfer["topology"]), problem, ["null"])
    for key in ("shares", "slice_bytes", "window_bytes"):
        if world == "sim" and transfer[key]:
            problem = "simulated links take whole copies, and have strict classes of their own"
            raise ConfigError(f"transfer.{key}", text_of(transfer[key]), problem, ["null"])


def _real_ssd(kvpool: Mapping[str, Any]) -> None:
    path, nbytes = kvpool["ssd_path"], kvpool["ssd_bytes"]
    if path is not None and nbytes is None:
        raise ConfigError("kvpool.ssd_path", path, "how much of the disk may be taken? give kvpool.ssd_bytes as well")
    if nbytes is not None and path is None:
        raise ConfigError("kvpool.ssd_bytes", nbytes, "where does it lie? give kvpool.ssd_path, a directory, as well")


def _encodings(config: Mapping[str, Any]) -> None:
    kvpool, given = config["kvpool"], config.get("plugins", {})
    accepts = None if "workload" in given else config["workload"].get("accepts_lossy")
    dram, ssd = kvpool["dram_encoding"], kvpool["ssd_encoding"]
    if ssd != "none" and kvpool["ssd_bytes"] is None:
        raise ConfigError("kvpool.ssd_encoding", ssd, "there is no SSD; give kvpool.ssd_bytes a size", ["none"])
    roles = {spec.role for spec in parse_cluster(config["cluster"])}
    if dram != "none" and accepts is False and roles != {Role.MIXED}:
        problem = "prefill instances hand blocks on by way of host memory, and requests do not accept rounded ones"
        fixes = ["none", "workload.accepts_lossy=true", "a cluster of mixed instances"]
        raise ConfigError("kvpool.dram_encoding", dram, problem, fixes)
    if config["verify"] and (dram != "none" or (ssd != "none" and accepts)):
        problem = "rounded blocks, and tokens that were computed from them, are not those of the reference"
        raise ConfigError("verify", True, problem, ["false"])


def _simulated(config: Mapping[str, Any]) -> None:
    if config["kvpool"]["ssd_path"] is not None:
        problem = "a simulated SSD has no bytes; kvpool.ssd_bytes alone says how large it is"
        raise ConfigError("kvpool.ssd_path", config["kvpool"]["ssd_path"], problem, ["null"])
    for key, usual in (("huge_pages", "auto"), ("numa_node", None)):
        if config["kvpool"][key] != usual:
            raise ConfigError(
                f"kvpool.{key}", config["kvpool"][key], "simulated memory is in no pages", [text_of(usual)]
            )
    if config["cost"]["_target_"] != MEASURED:
        return
    from mcjax.app.schema.files import default_of

    for name in SIZES_OF_A_MEASURED_MACHINE:
        value = config["backend"][name]
        if value != default_of("backend/sim", name):
            raise ConfigError(
                f"backend.{name}", value, "cost=measured brings the sizes of the engine that was measured"
            )


def _unread(config: Mapping[str, Any], world: str) -> None:
    sections, places, why = UNREAD[world]
    given = [place for place in places if place in config.get("plugins", {})]
    for key, value in [(place, config["plugins"][place]) for place in given] + list(_changed(config, world, sections)):
        raise ConfigError(key, text_of(value), f"backend={world} has no use for it: {why}")


def _changed(config: Mapping[str, Any], world: str, sections: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """What of the unread keys is not as it is by default."""
    from mcjax.app.compose import compose, plain_of

    usual = flat(plain_of(compose([f"backend={world}", f"seed={config['seed']}"])))
    for key, value in flat(cast("dict[str, Any]", config)).items():
        unread = any(f"{key}.".startswith(f"{section}.") for section in sections)
        if unread and (key not in usual or usual[key] != value):
            yield key.removesuffix("._target_"), value
