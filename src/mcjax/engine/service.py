"""A service: conductor, cluster and frontend of one run, put together and kept running."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mcjax import aio
from mcjax.cost.base import CostModel
from mcjax.engine.cluster import Cluster, Mechanisms, Policies, Timing
from mcjax.engine.cluster_spec import InstanceSpec
from mcjax.engine.decoder import DecodeSettings, Preemption
from mcjax.engine.frontend import Frontend
from mcjax.engine.replication import ReplicationSettings
from mcjax.kvpool.keys import BlockNamer
from mcjax.sched.conductor import Conductor
from mcjax.sched.placement import Strategies
from mcjax.sched.reports import ReportBus
from mcjax.sched.state import ClusterState, LinkEstimate
from mcjax.transfer.base import Transport
from mcjax.transfer.engine import TransferEngine
from mcjax.transfer.paths.base import PathChoice
from mcjax.transfer.paths.least_queued import LeastQueued
from mcjax.transfer.paths.path import PathSettings
from mcjax.types import NS_PER_S, SLO, Recorder, Request, Tokenizer


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run may turn that is no strategy."""

    report_period_s: float = 0.1  # instances, pools and links report so often
    view_delay_s: float = 0.0  # reports reach the conductor so much later
    attempts: int = 4  # placements of a job before it fails
    transfer_deadline_s: float = 60.0  # bound on one attempt at a copy
    transfer_attempts: int = 3  # attempts at a copy
    path_choice: PathChoice = field(default_factory=LeastQueued)  # which ways a copy takes where there are several
    paths: PathSettings = field(default_factory=PathSettings)  # patience and so on; what a link carries the world says
    headroom_tokens: int | None = None  # output tokens that pages are taken for before decoding; None: max_tokens
    preemption: Preemption = "swap"  # how who makes room goes: to the node's DRAM, or to be computed again
    streaming: bool = True  # blocks go to the receiving node while their prompt is still computed
    max_steps: int | None = None  # bound on a macro-step; 1 makes every step an event
    timeout_s: float | None = None  # a request without a time-out of its own fails so long after it came
    hbm_cache: bool = False  # instances keep blocks in pages that nobody needs
    timing: Timing = field(default_factory=Timing)
    replication: ReplicationSettings = field(default_factory=ReplicationSettings)


class Service:
    """Built on a running loop, inside a scope that ends it."""

    def __init__(
        self,
        scope: aio.Scope,
        mechanisms: Mechanisms,
        transports: Sequence[Transport],
        cost: CostModel,
        link: LinkEstimate,
        namer: BlockNamer,
        strategies: Strategies,
        policies: Policies,
        slo: Callable[[Request], SLO],
        rng: np.random.Generator,
        recorder: Recorder,
        settings: Settings,
        keeps_tokens: bool,
        share_decoded: bool,
        tokenizer: Callable[[], Tokenizer] | None = None,
        ssd: LinkEstimate | None = None,
    ):
        kv_format = namer.kv_format
        self.bus = ReportBus(round(settings.report_period_s * NS_PER_S), round(settings.view_delay_s * NS_PER_S))
        state = ClusterState(cost, link, kv_format.bytes_per_token, kv_format.block_tokens, ssd)
        self.conductor = Conductor(state, strategies, self.bus, rng, recorder, settings.attempts)
        self.engine = TransferEngine(
            transports,
            recorder,
            settings.transfer_deadline_s,
            settings.transfer_attempts,
            settings.path_choice,
            replace(settings.paths, link=(link.bytes_per_s, link.latency_s)),
        )
        self.cluster = Cluster(
            mechanisms,
            self.conductor,
            self.bus,
            self.engine,
            namer,
            policies,
            recorder,
            settings.timing,
            DecodeSettings(settings.headroom_tokens, settings.preemption, share_decoded),
            scope,
            settings.max_steps,
            settings.hbm_cache,
            settings.replication,
            settings.streaming,
        )
        self.frontend = Frontend(self.conductor, namer, slo, recorder, keeps_tokens, tokenizer, settings.timeout_s)

    def start(self, instances: Sequence[InstanceSpec]) -> None:
        for spec in instances:
            self.cluster.join(spec)
