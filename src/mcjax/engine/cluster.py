"""The cluster: nodes and instances of one run, put together; they join, drain, leave and die here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from mcjax import aio
from mcjax.engine.base import InstanceParts
from mcjax.engine.cluster_spec import InstanceSpec
from mcjax.engine.decode import DecodeInstance
from mcjax.engine.decoder import DecodeSettings
from mcjax.engine.instance import Instance
from mcjax.engine.mixed import MixedInstance
from mcjax.engine.node import Node
from mcjax.engine.prefill import PrefillInstance
from mcjax.kvpool.base import BlockStore, Eviction, Watermark
from mcjax.kvpool.keys import BlockNamer
from mcjax.kvpool.pool import Pool
from mcjax.sched.base import Batching, Tenancy
from mcjax.sched.batching.prefill_first import PrefillFirst
from mcjax.sched.conductor import Conductor
from mcjax.sched.reports import ReportBus
from mcjax.transfer.engine import TransferEngine
from mcjax.types import NS_PER_S, Recorder, Role


@dataclass(frozen=True, slots=True)
class Timing:
    """Bounds and periods of the procedures."""

    lease_s: float = 10.0  # a lease ends so long after its holder's last heartbeat
    wait_s: float = 120.0  # how long a job waits for room in a full pool
    detect_s: float = 2.0  # how long after its death an instance is given up


class Mechanisms(Protocol):
    """What the cluster needs of a world."""

    def instance(self, name: str, node: str, role: Role) -> InstanceParts: ...

    def pool_store(self, node: str) -> BlockStore: ...


@dataclass(frozen=True, slots=True)
class Policies:
    """Strategies that each instance or node gets one of its own of."""

    eviction: Callable[[], Eviction]
    watermark: Callable[[], Watermark]
    batching: Callable[[], Batching]
    tenancy: Callable[[], Tenancy]


_ROLES: dict[Role, type[Instance]] = {
    Role.PREFILL: PrefillInstance,
    Role.DECODE: DecodeInstance,
    Role.MIXED: MixedInstance,
}


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
    ):
        self.instances: dict[str, Instance] = {}
        self.nodes: dict[str, Node] = {}
        self.departed: list[Instance] = []
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

    def join(self, spec: InstanceSpec) -> Instance:
        """Bring an instance up and tell the conductor."""
        role = self._conductor.role_of(spec.name, spec.role)
        node = self._node(spec.node)
        parts = self._mechanisms.instance(spec.name, node.name, role)
        self._engine.register(parts.pages)
        batching = self._policies.batching() if role is Role.MIXED else PrefillFirst()
        instance = _ROLES[role](
            spec.name,
            node,
            self.nodes,
            parts.executor,
            parts.pages,
            self._conductor,
            self._bus,
            self._namer,
            self._recorder,
            batching,
            self._policies.tenancy(),
            self._decoding,
            self._max_steps,
        )
        capacity = instance.capacity
        free_tokens = capacity.pages * capacity.page_tokens
        self._conductor.join(instance, node.name, role, node.pool, free_tokens)
        self.instances[spec.name] = instance
        instance.loop.on_lost = partial(self.lost, spec.name)
        self._scope.spawn(instance.loop.run(), f"{spec.name}.loop")
        self._scope.spawn(node.heartbeat(), f"{node.name}.heartbeat")
        self._recorder.event(aio.now_ns(), "join", -1, spec.name, detail=role)
        return instance

    def _node(self, name: str) -> Node:
        store = self._mechanisms.pool_store(name)
        self._engine.register(store)
        policies, timing = self._policies, self._timing
        pool = Pool(
            name,
            store,
            policies.eviction(),
            policies.watermark(),
            self._recorder,
            round(timing.lease_s * NS_PER_S),
            partial(self._bus.blocks, name),
            self._namer.kv_format.groups,
        )
        node = Node(name, pool, self._engine, round(timing.wait_s * NS_PER_S))
        self.nodes[name] = node
        return node

    async def drain(self, name: str, poll_s: float = 0.01) -> None:
        """Place nothing more on an instance, wait until its last job is done and nobody holds anything in its pool, and
        let it go."""
        self._conductor.drain(name)
        instance = self.instances[name]
        while instance.jobs or self._conductor.placed_on(name) or instance.node.pool.held:
            await aio.sleep_ns(round(poll_s * NS_PER_S))
        self._gone(name)
        self._conductor.leave(name)
        self._recorder.event(aio.now_ns(), "leave", -1, name)

    def kill(self, name: str) -> None:
        """The instance's process and its node's memory are gone; the others find out after `detect_s`."""
        instance = self.instances[name]
        instance.kill()
        self._gone(name)
        self._recorder.event(aio.now_ns(), "death", -1, name)
        found_ns = aio.now_ns() + round(self._timing.detect_s * NS_PER_S)
        aio.clock().call_at_ns(found_ns, self._conductor.leave, name)

    def lost(self, name: str) -> None:
        """The instance's device has lost its pages: everybody is told at once, and it comes back no more."""
        self.instances[name].kill()
        self._gone(name)
        self._recorder.event(aio.now_ns(), "death", -1, name, detail="its pages are lost")
        self._conductor.leave(name)

    def _gone(self, name: str) -> None:
        self.departed.append(self.instances.pop(name))

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if any live pool or store does not add up."""
        for instance in self.instances.values():
            instance.node.pool.check_integrity()
            instance.pages.store.check_integrity()

    def check_idle(self) -> None:
        """Raise `IntegrityError` if, with no request left, anything is still held anywhere that lives."""
        self.check_integrity()
        for instance in self.instances.values():
            instance.node.pool.check_idle()
            instance.pages.check_idle()
