"""The cluster: nodes and instances of one run, put together; they join, drain, leave and die here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from mcjax import aio
from mcjax.engine.base import InstanceParts
from mcjax.engine.below import TierBelow
from mcjax.engine.cluster_spec import InstanceSpec
from mcjax.engine.decode import DecodeInstance
from mcjax.engine.decoder import DecodeSettings
from mcjax.engine.instance import Instance
from mcjax.engine.mixed import MixedInstance
from mcjax.engine.node import Node
from mcjax.engine.pages import Pages
from mcjax.engine.prefill import PrefillInstance
from mcjax.engine.promotion import Promotion
from mcjax.engine.replication import ReplicationSettings, Replicator
from mcjax.engine.saving import Saving
from mcjax.kvpool.base import BlockStore, Eviction, Tiering, Watermark
from mcjax.kvpool.gone import Gone
from mcjax.kvpool.keys import BlockNamer
from mcjax.kvpool.pool import Pool
from mcjax.kvpool.quotas import Quota
from mcjax.kvpool.tiering.write_through import WriteThrough
from mcjax.kvpool.watermark.static import Static
from mcjax.sched.base import Batching, Tenancy
from mcjax.sched.batching.prefill_first import PrefillFirst
from mcjax.sched.conductor import Conductor
from mcjax.sched.reports import ReportBus
from mcjax.transfer.engine import TransferEngine
from mcjax.transfer.layout.agreed import Agreed
from mcjax.types import NS_PER_S, Recorder, Role


@dataclass(frozen=True, slots=True)
class Timing:
    """Bounds and periods of the procedures."""

    lease_s: float = 10.0  # a lease ends so long after its holder's last heartbeat
    wait_s: float = 120.0  # how long a job waits for room in a full pool
    detect_s: float = 2.0  # how long after its death an instance is given up
    tier_s: float = 10.0  # how long one move to or from an SSD may take before that counts as unavailable


class Mechanisms(Protocol):
    """What the cluster needs of a world."""

    def instance(self, name: str, node: str, role: Role) -> InstanceParts: ...

    def pool_store(self, node: str) -> BlockStore: ...

    def ssd_store(self, node: str) -> BlockStore | None: ...


@dataclass(frozen=True, slots=True)
class Policies:
    """Strategies that each instance or node gets one of its own of."""

    eviction: Callable[[], Eviction]
    watermark: Callable[[], Watermark]
    batching: Callable[[], Batching]
    tenancy: Callable[[], Tenancy]
    tiering: Callable[[], Tiering] = WriteThrough
    quotas: Mapping[str, Quota] = field(default_factory=dict[str, Quota])
    """Tenants' shares of each node's host memory and of its SSD."""


_ROLES: dict[Role, type[Instance]] = {
    Role.PREFILL: PrefillInstance,
    Role.DECODE: DecodeInstance,
    Role.MIXED: MixedInstance,
}


@dataclass(frozen=True, slots=True)
class _Watcher:
    """Tells the cluster what becomes of one of its instances."""

    cluster: Cluster
    spec: InstanceSpec

    def died(self) -> None:
        self.cluster.died(self.spec.name)

    def replaced(self, by: str) -> None:
        self.cluster.replaced(self.spec, by)


class Cluster:
    """Every instance has a node of its own: a pool, and an engine shared by the process."""

    def __init__(
        self,
        mechanisms: Mechanisms,
        conductor: Conductor,
        bus: ReportBus,
        engine: TransferEngine,
        namer: BlockNamer,
        policies: Policies,
        recorder: Recorder,
        timing: Timing,
        decoding: DecodeSettings,
        scope: aio.Scope,
        max_steps: int | None = None,
        hbm_cache: bool = False,
        replication: ReplicationSettings = ReplicationSettings(),  # noqa: B008  (frozen)
        streaming: bool = True,
    ):
        self.instances: dict[str, Instance] = {}
        self.nodes: dict[str, Node] = {}
        self.departed: list[Instance] = []
        self.savings: dict[str, Saving] = {}
        """By node: what brings blocks down to its SSD."""
        self._mechanisms = mechanisms
        self._conductor = conductor
        self._bus = bus
        self._engine = engine
        self._namer = namer
        self._policies = policies
        self._recorder = recorder
        self._timing = timing
        self._decoding = decoding
        self._scope = scope
        self._max_steps = max_steps
        self._hbm_cache = hbm_cache
        self._streaming = streaming
        self._layouts = Agreed()
        self._gone_blocks = Gone()
        self.replicator = Replicator(self.nodes, conductor, recorder, scope, replication)
        """Keeps what it is told to keep; nobody tells it by itself."""

    def join(self, spec: InstanceSpec) -> Instance:
        """Bring an instance up and tell the conductor."""
        role = self._conductor.role_of(spec.name, spec.role)
        node = self._node(spec.node)
        node.domain = spec.fault_domain or node.name
        parts = self._mechanisms.instance(spec.name, node.name, role)
        batching = self._policies.batching() if role is Role.MIXED else PrefillFirst()
        instance = _ROLES[role](
            spec.name,
            node,
            self.nodes,
            parts.executor,
            self._pages(node.name, parts.pages),
            self._conductor,
            self._bus,
            self._namer,
            self._recorder,
            batching,
            self._policies.tenancy(),
            self._decoding,
            self._max_steps,
            self._streaming,
        )
        capacity = instance.capacity
        free_tokens = capacity.pages * capacity.page_tokens
        self._conductor.join(instance, node.name, role, node.pool, free_tokens)
        self.instances[spec.name] = instance
        node.on_outgoing = instance.publish
        instance.loop.on_lost = partial(self.lost, spec.name)
        parts.watch(_Watcher(self, spec))
        self._scope.spawn(instance.loop.run(), f"{spec.name}.loop")
        self._scope.spawn(node.heartbeat(), f"{node.name}.heartbeat")
        self._recorder.event(aio.now_ns(), "join", -1, spec.name, detail=role)
        self.replicator.changed()
        return instance

    def _node(self, name: str) -> Node:
        pool = self._pool(name, self._mechanisms.pool_store(name), self._policies.watermark())
        store = self._mechanisms.ssd_store(name)
        ssd = None if store is None else self._pool(name, store, Static())
        node = Node(name, pool, self._engine, round(self._timing.wait_s * NS_PER_S), ssd)
        node.on_ssd_queue = partial(self._bus.ssd_queue, name)
        self.nodes[name] = node
        if ssd is not None:
            self._connect(node, ssd)
        return node

    def _connect(self, node: Node, ssd: Pool) -> None:
        """What leaves the node's host memory goes down to its SSD, and comes back up from there."""
        tiering = self._policies.tiering()
        below = TierBelow(node, ssd, round(self._timing.tier_s * NS_PER_S))
        saving = Saving(node, below, tiering, self._recorder)
        node.pool.room.saver = saving
        node.promotion = Promotion(node, below, tiering.exclusive, self._recorder, saving.on_shed)
        self.savings[node.name] = saving
        self._scope.spawn(saving.run(), f"{node.name}.saving")

    def _pool(self, node: str, store: BlockStore, watermark: Watermark) -> Pool:
        self._layouts.admit(store.name, store.layout)
        self._engine.register(store)
        pool = Pool(
            node,
            store,
            self._policies.eviction(),
            watermark,
            self._recorder,
            round(self._timing.lease_s * NS_PER_S),
            partial(self._bus.blocks, node, tier=store.tier),
            self._namer.kv_format.groups,
            self._gone_blocks,
        )
        pool.room.quotas = self._policies.quotas
        return pool

    def _pages(self, node: str, store: BlockStore) -> Pages:
        """An instance's pages; what lies in them is not reported, it is the instance's own business."""
        self._layouts.admit(store.name, store.layout)
        self._engine.register(store)
        pool = Pool(
            node,
            store,
            self._policies.eviction(),
            Static(),
            self._recorder,
            round(self._timing.lease_s * NS_PER_S),
            groups=self._namer.kv_format.groups,
            gone=self._gone_blocks if self._hbm_cache else None,
        )
        return Pages(pool, self._hbm_cache)

    async def drain(self, name: str, poll_s: float = 0.01) -> None:
        """Place nothing more on an instance, wait until its last job is done and nobody holds anything in its pool, and
        let it go."""
        self._conductor.drain(name)
        self.replicator.changed()
        instance = self.instances[name]
        while instance.jobs or self._conductor.placed_on(name) or instance.node.pool.held:
            await aio.sleep_ns(round(poll_s * NS_PER_S))
        self._gone(name)
        self._given_up(name)
        self._recorder.event(aio.now_ns(), "leave", -1, name)

    def kill(self, name: str) -> None:
        """The instance's process and its node's memory are gone; the others find out after `detect_s`."""
        instance = self.instances[name]
        instance.kill()
        self._gone(name)
        self._recorder.event(aio.now_ns(), "death", -1, name)
        found_ns = aio.now_ns() + round(self._timing.detect_s * NS_PER_S)
        aio.clock().call_at_ns(found_ns, self._given_up, name)

    def lost(self, name: str) -> None:
        """The instance's device has lost its pages: everybody is told at once, and it comes back no more."""
        self._die(name, "its pages are lost")

    def died(self, name: str) -> None:
        """The instance's process has gone, and that has been noticed: as when its pages are lost. One that has left, or
        was given up before, dies unheeded."""
        if name in self.instances:
            self._die(name, "its process is gone")

    def replaced(self, spec: InstanceSpec, by: str) -> None:
        """Somebody else is ready to be what `spec` was: joins, under the name `by`."""
        self.join(InstanceSpec(by, spec.role, spec.fault_domain))

    def _die(self, name: str, why: str) -> None:
        self.instances[name].kill()
        self._gone(name)
        self._recorder.event(aio.now_ns(), "death", -1, name, detail=why)
        self._given_up(name)

    def _gone(self, name: str) -> None:
        self.departed.append(self.instances.pop(name))

    def _given_up(self, name: str) -> None:
        self._conductor.leave(name)
        self.replicator.changed()

    async def quiesce(self, poll_s: float = 0.01, most_s: float = 60.0) -> None:
        """Wait until whatever is on its way to an SSD, and can get there, is there, every copy has been answered, and
        what the dead held elsewhere has run out; no longer than `most_s`."""
        end_ns = aio.now_ns() + round(most_s * NS_PER_S)
        while self._engine.in_flight or any(not saving.idle for saving in self.savings.values()) or self._haunted:
            if aio.now_ns() >= end_ns:
                return
            await aio.sleep_ns(round(poll_s * NS_PER_S))

    @property
    def _haunted(self) -> bool:
        """Whether somebody has died whose leases may not have ended: nobody renews them."""
        died = any(not instance.node.alive for instance in self.departed)
        return died and any(node.alive and node.pool.next_expiry_ns() is not None for node in self.nodes.values())

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if any live pool or store does not add up."""
        for instance in self.instances.values():
            for pool in instance.node.pools:
                pool.check_integrity()
            instance.pages.check_integrity()

    def check_idle(self) -> None:
        """Raise `IntegrityError` if, with no request left, anything is still held anywhere that lives; wanted replicas
        are let go of first."""
        self.replicator.close()
        self.check_integrity()
        for instance in self.instances.values():
            for pool in instance.node.pools:
                pool.check_idle()
            instance.pages.check_idle()
