"""The keys of a config that no one class of ours takes: their kinds, bounds and units, section by section.

A key's default and what it means stand where it is declared, in `conf/`. Sections with a `_target_` are not here: the
signature of what they name says what they take. Nothing is ever made of these classes: they are read for their
annotations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from mcjax.app.schema.kinds import Bounds, Form
from mcjax.backends.jax.meshes import read_meshes
from mcjax.engine.cluster_spec import parse_cluster
from mcjax.track.tracker import Settings as Track
from mcjax.transfer.paths.queue import read_shares
from mcjax.transfer.topology import read_topology

Count = Annotated[int, Bounds(1)]
Index = Annotated[int, Bounds(0)]
Tokens = Annotated[int, Bounds(1, unit="tokens")]
Bytes = Annotated[int, Bounds(1, unit="bytes")]
Seconds = Annotated[float, Bounds(0, unit="seconds")]
MoreSeconds = Annotated[float, Bounds(above=0, unit="seconds")]
Period = Annotated[float, Bounds(1e-6, unit="seconds")]
"""Shorter ones than a microsecond would be no time at all in nanoseconds, or stop virtual time."""
Share = Annotated[float, Bounds(above=0, most=1)]
Penalty = Annotated[float, Bounds(-2, most=2)]
Spread = Annotated[float, Bounds(0, most=1)]

Cluster = Annotated[
    object,
    Form("instances, such as 8p8d, 16m, 2p2d+1m or {prefill: 8, decode: 8}", lambda key, v: parse_cluster(v, key)),
]
Mesh = Annotated[
    object,
    Form(
        "a whole number of devices, 1 or more, a mapping of axes (tensor, expert), or of roles to these",
        lambda key, value: read_meshes(value),
    ),
]

Shares = Annotated[
    object,
    Form("a mapping from classes to parts of 1", lambda key, value: read_shares(key, value)),
]
Nics = Annotated[
    object,
    Form("nics, rails, or a mapping", lambda key, value: read_topology(value, None)),
]


class Root:
    """Beside the groups."""

    cluster: Cluster
    cluster_changes: list[Any]
    seed: Index
    slices: Count
    slice: Index
    verify: bool | None
    rerun: bool
    question: str | None
    debug: bool


class Engine:
    """`engine`: bounds and periods of the instances' procedures."""

    headroom_tokens: Tokens | None
    preemption: Literal["swap", "recompute"]
    streaming: bool
    timeout_s: MoreSeconds | None
    max_steps: Count | None
    lease_s: MoreSeconds
    wait_s: Seconds
    detect_s: Seconds
    stall_s: MoreSeconds


class Sched:
    """`sched`, beside its strategies."""

    report_period_s: Period
    view_delay_s: Seconds
    attempts: Count


class Transfer:
    """`transfer`, beside its strategy."""

    deadline_s: MoreSeconds
    attempts: Count
    failures: Count
    backoff_s: Seconds
    most_backoff_s: Seconds
    shares: Shares | None
    slice_bytes: Bytes | None
    window_bytes: Bytes | None
    topology: Nics | None


class KVPool:
    """`kvpool`, beside its strategies."""

    block_tokens: Tokens | None
    dram_bytes: Bytes | None
    hbm_cache: bool
    ssd_bytes: Bytes | None
    ssd_path: str | None
    dram_encoding: Literal["none", "int8", "fp8"]
    ssd_encoding: Literal["none", "int8", "fp8"]
    huge_pages: Literal["auto", "never", "require"]
    numa_node: Index | None
    tenants: dict[str, Any]


class Kernels:
    """`kernels`."""

    prefill: Literal["xla", "pallas", "reference"] | dict[str, Any]
    decode: Literal["xla", "pallas", "reference"] | dict[str, Any]
    kv_pack: Literal["xla", "pallas"] | dict[str, Any]
    pages: Literal["tokens_first", "heads_first"]


class EmbeddedLauncher:
    """`launcher=embedded`."""

    name: Literal["embedded"]


class ProcessesLauncher:
    """`launcher=processes`."""

    name: Literal["processes"]
    transport: Literal["shm", "tcp", "rdma", "jax"]
    command: dict[str, str]
    host: dict[str, str]
    silence_s: MoreSeconds
    restart: bool


class JaxBackend:
    """`backend=jax`."""

    name: Literal["jax"]
    numerics: Literal["invariant", "fast"]
    tolerance: Annotated[float, Bounds(above=0)] | None
    chunk_tokens: Tokens
    prefill_widths: Literal["auto"] | list[Count]
    max_batch: Count
    decode_batches: Literal["auto"] | list[Count]
    fused_steps: Count
    max_context_tokens: Tokens
    pages: Count | None
    memory_share: Share
    memory_bytes: Bytes | None
    pool_blocks: Count
    mesh: Mesh
    compilation_cache: str | None
    poison: bool
    verify: bool


class SimBackend:
    """`backend=sim`."""

    name: Literal["sim"]
    chunk_tokens: Tokens
    max_batch: Count
    memory_share: Share
    spine_bytes_per_s: Annotated[float, Bounds(above=0, unit="bytes a second")] | None
    noise: Spread


class CheckBackend:
    """`backend=check`."""

    name: Literal["check"]
    schedules: Count
    shape: Cluster | None


class HitsBackend:
    """`backend=hits`."""

    name: Literal["hits"]
    traces: dict[str, Any]
    policies: list[str]
    capacities_tokens: list[Tokens]
    processes: Count | None


class Sampling:
    """`workload.sampling` of `workload=text`: how tokens are chosen."""

    temperature: Annotated[float, Bounds(0)]
    seed: Index | None
    top_k: Index
    top_p: Share
    min_p: Spread
    min_tokens: Annotated[int, Bounds(0, unit="tokens")]
    repetition_penalty: Annotated[float, Bounds(above=0)]
    presence_penalty: Penalty
    frequency_penalty: Penalty
    stop_strings: list[str]
    logprobs: Index | None
    n: Count


SECTIONS: Mapping[str, type] = {
    "engine": Engine,
    "kernels": Kernels,
    "kvpool": KVPool,
    "transfer": Transfer,
    "sched": Sched,
    "track": Track,
}
"""By key of the config. What becomes of `track` is a dataclass already, and checks its own bounds."""

BACKENDS: Mapping[str, type] = {"jax": JaxBackend, "sim": SimBackend, "check": CheckBackend, "hits": HitsBackend}
"""The section `backend`, by `backend.name`."""

LAUNCHERS: Mapping[str, type] = {"embedded": EmbeddedLauncher, "processes": ProcessesLauncher}
"""The section `launcher`, by `launcher.name`."""

BY_NAME: Mapping[str, Mapping[str, type]] = {"backend": BACKENDS, "launcher": LAUNCHERS}
"""Sections whose options have keys of their own: by their key `name`."""

MADE = ("hardware", "model", "cost", "workload", "slo", "faults")
"""Sections with a `_target_`, beside the strategies (`plugins.PLACES`)."""

PARTS: Mapping[str, Mapping[str, type]] = {"mcjax.workload.text.Text": {"sampling": Sampling}}
"""Mappings that a class takes, and whose keys it does not declare one by one."""
