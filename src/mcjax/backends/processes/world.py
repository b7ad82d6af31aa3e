"""The real engine with an instance a process: decisions and procedures stay here, mechanisms are orders to workers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from mcjax import aio
from mcjax.backends.at_rest import at_rest
from mcjax.backends.base import WorldInputs
from mcjax.backends.processes.executor import RemoteExecutor
from mcjax.backends.processes.figures import together
from mcjax.backends.processes.fleet import Fleet, Settings
from mcjax.backends.processes.measure import calibrate, read_speed
from mcjax.backends.processes.member import Member
from mcjax.backends.processes.stores import RemoteStore
from mcjax.backends.processes.transports import BetweenNodes, OrderedTransport, inside_a_node
from mcjax.cost.base import CostModel
from mcjax.engine.base import Capacity, InstanceParts, Watcher
from mcjax.errors import ConfigError, RunError
from mcjax.kernels.serves import check_serves
from mcjax.transfer.base import Transport
from mcjax.transfer.layout.describe import Layout
from mcjax.transfer.transports.endpoint import RegionDescriptor
from mcjax.transfer.transports.remote import BLOCKS
from mcjax.types import NS_PER_S, KVFormat, NullRecorder, Role, Tier

T = TypeVar("T")

LOG = logging.getLogger(__name__)


class ProcessesWorld:
    """Implements `mcjax.backends.base.World`: one worker an instance, each with its node's host memory.

    `backend`: what `conf/backend/jax.yaml` says, for the workers; `deadline_s` bounds a copy between them. JAX is not
    imported here.
    """

    name = "jax"
    virtual = False
    keeps_tokens = True

    def __init__(self, inputs: WorldInputs, backend: Mapping[str, Any], settings: Settings, deadline_s: float):
        self._inputs = inputs
        self._backend = backend
        self._settings = settings
        self._recorder = inputs.recorder
        check_serves(inputs.kernels, inputs.model)
        self.shares_decoded = backend["numerics"] == "fast"
        self._fleet = Fleet(settings, self._config(deadline_s), self._late, self._died)
        self._executors: dict[str, RemoteExecutor] = {}
        self._watchers: dict[str, Watcher] = {}
        self._deaths: dict[str, str] = {}
        self._replacing: dict[asyncio.Task[None], None] = {}
        self._replaced = 0
        self._compiled = 0
        self._measured_bytes: dict[str, int] = {}
        self._start_s: float | None = None
        self._shape: dict[str, Any] = {}
        self._cost: CostModel | None = None
        self._link: tuple[float, float] | None = None
        channels = self._fleet.channels
        self._device = OrderedTransport("device", self._recorder, channels, inside_a_node)
        self._between = BetweenNodes(settings.transport, self._recorder, channels)

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `main` on a stock asyncio loop; whatever ends it, no worker is left behind."""
        try:
            # A plain loop, whatever policy is installed: `aio.WallClock` looks at its ready queue.
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                return runner.run(main())
        finally:
            self._fleet.end(at_once=True)

    def devices(self) -> list[str]:
        """What is known before a worker has looked."""
        count, transport = len(self._inputs.roles), self._settings.transport
        return [f"a process each for {count} instances, which reach each other by {transport}"]

    def kv_format(self) -> KVFormat:
        """The model's groups. The fingerprint is the workers', and empty until they are ready."""
        return self._inputs.model.kv_format(self._inputs.block_tokens, self._shape.get("fingerprint", ""))

    def cost(self) -> CostModel:
        """What `prepare` measured. Raises `RuntimeError` before."""
        if self._cost is None:
            raise RuntimeError("the cost model is measured by prepare()")
        return self._cost

    def link(self) -> tuple[float, float]:
        """Bytes a second and latency of a read from worker to worker, as `prepare` measured them."""
        if self._link is None:
            raise RuntimeError("the link is measured by prepare()")
        return self._link

    def ssd(self) -> None:
        """Nodes have no SSD tier here."""

    async def prepare(self, instances: list[tuple[str, Role]], report: Callable[[str, float], None]) -> None:
        """Start all workers, those for instances that join later too, side by side; make them known to each other;
        measure.

        Raises `RunError` or `ConfigError` if one of them cannot be.
        """
        began_s = time.monotonic()
        stages: dict[str, float] = {}
        parts = len(instances) + 1

        def stage(name: str, what: str, share_done: float) -> None:
            stages[name] = share_done
            report(f"{name}: {what}", sum(stages.values()) / parts)

        members = [self._fleet.start(name, role, stage) for name, role in instances]
        for member in members:
            await member.ready()
            self._fleet.introduce(member)
        self._record_shape(members)
        report("measuring", len(members) / parts)
        found = await calibrate(members)
        self._recorder.outcome(0, "calibration", 0, dataclasses.asdict(found))
        self._cost = found
        await self._measure_link(members)
        if self._deaths:
            raise RunError(f"a worker is gone before the run began: {next(iter(self._deaths.values()))}")
        self._start_s = time.monotonic() - began_s
        report("ready", 1.0)

    def instance(self, name: str, node: str, role: Role) -> InstanceParts:
        """The proxy of an executor, and the books of its pages. Of an instance whose worker is ready."""
        channel, capacity = self._fleet.members[name].channel, self._capacity()
        pages = RemoteStore(
            node,
            Tier.HBM,
            capacity.pages,
            capacity.page_bytes,
            channel,
            f"{name}.{Tier.HBM}",
            poison=self._backend["poison"],
        )
        executor = self._executors[name] = RemoteExecutor(name, channel, capacity, self._recorder)
        return InstanceParts(executor, pages, partial(self._watch, name))

    def pool_store(self, node: str) -> RemoteStore:
        """The books of a node's host memory."""
        packer = at_rest(self._inputs.tiers, self._inputs.model, self.kv_format()).dram
        store = RemoteStore(
            node,
            Tier.DRAM,
            self._shape["pool_blocks"],
            packer.packed_bytes,
            self._fleet.channels[node],
            packer=packer,
            poison=self._backend["poison"],
        )
        member = next(member for member in self._fleet.members.values() if member.node == node)
        told = RegionDescriptor.from_json(member.facts["region"]).layout.get(BLOCKS)
        store.layout = Layout.from_values(told) if told else None  # what the worker itself says
        return store

    def ssd_store(self, node: str) -> None:
        """None: see `ssd`."""

    def transports(self) -> list[Transport]:
        return [self._device, self._between]

    async def remove(self, instance: str) -> None:
        """Nothing: the worker of an instance that left holds its memory until the run ends."""

    def figures(self) -> dict[str, Any]:
        """What `summary.json` says of this world: what an embedded one says, and the processes."""
        members = self._fleet.members.values()
        processes = {
            "transport": self._settings.transport,
            "bytes_between": self._between.stats().bytes_moved,
            "start_s": self._start_s,
            "workers": {member.name: self._worker(member) for member in members},
        }
        told = [member.figures for member in members if member.figures is not None]
        return {**together(told), "processes": processes}

    def _worker(self, member: Member) -> dict[str, Any]:
        """One worker's own figures. `bytes_read`: by its endpoint from other processes, None if it died."""
        figures, executor = member.figures, self._executors.get(member.name)
        overheads = list[int]() if executor is None else list(executor.overheads_ns)
        return {
            "pid": member.process.pid,
            "devices": member.facts.get("devices"),
            "bytes_read": figures and figures["bytes_read"] - self._measured_bytes.get(member.name, 0),
            "order_overhead_s": statistics.median(overheads) / NS_PER_S if overheads else None,
            "death": member.death or None,
        }

    async def close(self) -> None:
        """Hear the workers' last words, and end them."""
        for task in list(self._replacing):
            await aio.settle(task)
        await self._fleet.last_words()
        self._fleet.end()

    # Preparation

    def _config(self, deadline_s: float) -> dict[str, Any]:
        """What all workers host alike, as plain values."""
        inputs = self._inputs
        if inputs.tiers.ssd_path is not None:
            raise ConfigError("kvpool.ssd_path", inputs.tiers.ssd_path, "workers have no SSD tier", ["null"])
        return {
            "model": dataclasses.asdict(inputs.model),
            "seed": inputs.seed,
            "block_tokens": inputs.block_tokens,
            "kernels": dataclasses.asdict(inputs.kernels),
            "path": [*filter(None, sys.path)],  # kernels of the user's own are found in the workers too
            "uncached_tokens": list(map(int, inputs.uncached_tokens())) if self.shares_decoded else [],
            "tiers": dataclasses.asdict(inputs.tiers),
            "backend": dict(self._backend),
            "deadline_s": deadline_s,
        }

    def _record_shape(self, members: list[Member]) -> None:
        """What a replay must know of this world, as the only outcome of the mechanism `world`."""
        shapes = [member.facts["world"] for member in members]
        if len({shape["fingerprint"] for shape in shapes}) != 1:
            raise RunError("the workers have loaded different weights")
        pages = min(shape["pages"] for shape in shapes)  # one number for all, as in one process
        self._shape = {**shapes[0], "pages": pages, "between": self._settings.transport}
        self._recorder.outcome(0, "world", 0, self._shape)

    def _capacity(self) -> Capacity:
        shape = self._shape
        return Capacity(
            pages=shape["pages"],
            page_tokens=shape["page_tokens"],
            page_bytes=next(iter(self._fleet.members.values())).facts["page_bytes"],
            max_batch=shape["max_batch"],
            chunk_tokens=shape["chunk_tokens"],
            max_context_tokens=shape["max_context_tokens"],
        )

    async def _measure_link(self, members: list[Member]) -> None:
        if len(members) == 1:
            link = members[0].facts["link"]
            found = link["bytes_per_s"], link["latency_s"]
        else:
            # A transport of its own, since its answers are in no log.
            quiet = BetweenNodes(self._settings.transport, NullRecorder(), self._fleet.channels)
            source, target = members[0], members[-1]
            found = await read_speed(quiet, self.pool_store(source.node), self.pool_store(target.node))
            self._measured_bytes[target.name] = quiet.stats().bytes_moved
        self._link = found
        self._recorder.outcome(0, "link", 0, {"bytes_per_s": found[0], "latency_s": found[1]})

    # What workers do by themselves: each a wake-up of its own, logged, so that it is replayed

    def _watch(self, name: str, watcher: Watcher) -> None:
        self._watchers[name] = watcher
        if name in self._deaths:
            watcher.died()

    def _died(self, name: str, why: str) -> None:
        """Comes before the wake-ups that answer what the worker was asked."""
        now_ns = aio.now_ns()
        self._recorder.outcome(now_ns, "death", len(self._deaths), {"instance": name, "why": why})
        self._deaths[name] = why
        LOG.warning("the process of %s: %s", name, why)
        watcher = self._watchers.get(name)
        if watcher is None:  # it had not joined
            return
        watcher.died()
        if self._settings.restart:
            task = aio.spawn(self._replace(self._fleet.members[name], watcher), f"{name}.replacement")
            self._replacing[task] = None
            task.add_done_callback(lambda task: self._replacing.pop(task, None))

    async def _replace(self, dead: Member, watcher: Watcher) -> None:
        """Start a worker in the place of one that died; when it is ready, its instance joins. One that cannot be is
        not tried again."""
        lives = sum(member.place == dead.place for member in self._fleet.members.values())
        member = self._fleet.start(f"{dead.place}-{lives + 1}", dead.role, _unseen, dead.place)
        try:
            await member.ready()
        except RunError as problem:
            LOG.warning("nobody takes the place of %s: %s", dead.name, problem)
            return
        shape = member.facts["world"]
        if shape["fingerprint"] != self._shape["fingerprint"] or shape["pages"] < self._shape["pages"]:
            LOG.warning(
                "nobody takes the place of %s: its worker came up with other weights, or fewer pages", dead.name
            )
            return
        self._fleet.introduce(member)
        by = {"instance": dead.name, "by": member.name}
        self._recorder.outcome(aio.now_ns(), "replacement", self._replaced, by)
        self._replaced += 1
        watcher.replaced(member.name)

    def _late(self, payload: Mapping[str, Any]) -> None:
        """A worker compiled something after its warm-up."""
        now_ns = aio.now_ns()
        self._recorder.outcome(now_ns, "compile", self._compiled, dict(payload))
        self._compiled += 1
        self._recorder.event(now_ns, "compile", -1, payload["place"], detail=payload["what"])


def _unseen(name: str, what: str, share_done: float) -> None:
    """Nobody watches how a replacement gets ready."""
