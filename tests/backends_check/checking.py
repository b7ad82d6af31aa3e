"""What the checking tests share: strategies that pull and co-schedule, and faults of every kind."""

from __future__ import annotations

from collections.abc import Callable

from mcjax.backends.check.faults import Faults
from mcjax.backends.check.schedule import Outcome, Parts, run_schedule
from mcjax.backends.check.world import CheckWorld
from mcjax.engine.cluster import Policies
from mcjax.engine.service import Service
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.watermark.static import Static as StaticWatermark
from mcjax.sched.admission.none import AdmitAll
from mcjax.sched.batching.chunked import Chunked
from mcjax.sched.decode.least_loaded import LeastLoaded
from mcjax.sched.fetch.cheapest import Cheapest
from mcjax.sched.placement import Strategies
from mcjax.sched.prefill.kvcache_centric import KVCacheCentric
from mcjax.sched.roles.static import Static
from mcjax.sched.tenancy.fifo import FIFO
from mcjax.types import NullRecorder

NO_FAULTS = Faults()
ALL_FAULTS = Faults(
    lost=0.03,
    late=0.03,
    duplicated=0.05,
    corrupted=0.04,
    slow=0.03,
    cancelled=0.1,
    missed=0.3,
    broken=0.001,
    raised=0.003,
    deaths=1.0,
    stale_views=1.0,
    lost_pages=0.3,
    ssd_failed=0.03,
    rotten=2.0,
    ssd_outages=0.5,
    nic_outages=1.0,
)


def strategies() -> Strategies:
    """Pulls whenever another node's prefix is longer, so that the network is used for more than deliveries."""
    return Strategies(KVCacheCentric(1.0), LeastLoaded(), Cheapest(), AdmitAll(), Static())


def run(
    seed: int, faults: Faults, sabotage: Callable[[Service, CheckWorld], None] = lambda service, world: None
) -> Outcome:
    policies = Policies(LRU, StaticWatermark, lambda: Chunked(6), FIFO)
    return run_schedule(seed, faults, Parts(strategies, policies, lambda table: NullRecorder(), sabotage))
