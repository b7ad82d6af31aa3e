"""What a worker process holds: one instance of the real engine, its node's host memory, and an endpoint to others."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from mcjax import aio
from mcjax.backends.base import Tiers
from mcjax.backends.jax.calibrate import fit, time_chunks, time_steps
from mcjax.backends.jax.device_store import DevicePages, PageRegion
from mcjax.backends.jax.executor import JaxExecutor
from mcjax.backends.jax.world import JaxWorld
from mcjax.backends.processes.endpoints import make_endpoint
from mcjax.backends.processes.frames import Message
from mcjax.backends.processes.plans import decode_plan
from mcjax.backends.progress import Failure, encode_failure, encode_progress
from mcjax.cost.model_shape import ModelShape
from mcjax.engine.base import Progress
from mcjax.errors import ExecutorFailed
from mcjax.kernels.choice import KernelChoice
from mcjax.kvpool.stores.host import POISON_BYTE
from mcjax.transfer.base import Copy, CopyResult, Region
from mcjax.transfer.transports.endpoint import Pending, RegionDescriptor, Spans
from mcjax.transfer.transports.remote import BLOCKS
from mcjax.transfer.transports.secret import Secret
from mcjax.transfer.transports.threaded import encode_results
from mcjax.types import NullRecorder, Role, Tier

Send = Callable[[str, Mapping[str, Any]], None]
"""Tell the controller: a kind, and its values. From any thread."""


class _Told(NullRecorder):
    """Keeps what the world says once, and passes on what it compiles too late."""

    def __init__(self, send: Send):
        self.once: dict[str, dict[str, Any]] = {}
        self._send = send

    def outcome(self, time_ns: int, mechanism: str, call: int, payload: dict[str, Any]) -> None:
        if mechanism == "compile":
            self._send("compiled", payload)
        elif mechanism in ("world", "link"):
            self.once[mechanism] = payload


class Hosted:
    """Made before anything else here uses JAX; everything but `prepare` on a running loop."""

    def __init__(self, config: Mapping[str, Any], secret: Secret, send: Send):
        self._config = config
        self._secret = secret
        self._send = send
        self._told = _Told(send)
        sys.path.extend(path for path in config["path"] if path not in sys.path)
        self._name, self._node, self._role = config["name"], config["node"], Role(config["role"])
        self.world = JaxWorld(
            ModelShape(**config["model"]),
            seed=config["seed"],
            block_tokens=config["block_tokens"],
            kernels=KernelChoice(**config["kernels"]),
            roles=[self._role],
            uncached_tokens=lambda: config["uncached_tokens"],
            tiers=Tiers(**config["tiers"]),
            recorder=self._told,
            **config["backend"],
        )
        self._orders: dict[str, Callable[[Message], None]] = {
            "run": self._run,
            "interrupt": self._interrupt,
            "copy": self._copy,
            "poison": self._poison,
            "peer": self._peer,
            "measure": self._measure,
            "figures": self._figures,
        }
        self._peers: dict[str, tuple[RegionDescriptor, int]] = {}
        self._running = -1
        """The number of the last plan."""
        self._tasks: dict[asyncio.Task[None], None] = {}

    async def prepare(self) -> dict[str, Any]:
        """Load, compile, take memory, and show it to peers. Returns what the controller has to know."""
        # First, since a machine may not have what it takes.
        self._endpoint = make_endpoint(self._config["transport"], self._secret, self._config["host"])
        await self.world.prepare([(self._name, self._role)], self._stage)
        parts = self.world.instance(self._name, self._node, self._role)
        self._executor, self._pages = cast("JaxExecutor", parts.executor), cast("DevicePages", parts.pages)
        self._memory = self.world.pool_store(self._node)
        self._device, self._local = self.world.transports()[:2]
        for transport in (self._device, self._local):
            transport.register(self._pages)
            transport.register(self._memory)
        layout = self._memory.layout
        self._exposed = self._endpoint.expose(
            self._memory.slab.flat(self._memory.area), layout=None if layout is None else {BLOCKS: layout.to_values()}
        )
        return {
            **self._told.once,
            "page_bytes": self._executor.capacity().page_bytes,
            "devices": self.world.devices(),
            "region": self._exposed.descriptor().to_json(),
            "stride_bytes": self._memory.area.stride_bytes,
        }

    def _stage(self, what: str, share_done: float) -> None:
        self._send("stage", {"what": what, "share_done": share_done})

    def obey(self, message: Message) -> None:
        """Take an order, in order of arrival; its answer comes later."""
        self._orders[message.kind](message)

    def close(self) -> None:
        """Let go of peers; the world closes itself."""
        self._endpoint.close()

    # Compute

    def _run(self, message: Message) -> None:
        """Its answer is sent from the executor's thread: the shortest way."""
        values = message.values
        order, origin_ns = values["order"], values["origin_ns"]

        def on_step(step: int, tokens: Sequence[int | None], end_ns: int) -> None:
            self._send("step", {"order": order, "step": step, "tokens": list(tokens), "end_ns": end_ns})

        def answered(answer: Progress | Failure, losses: int) -> None:
            encoded = encode_progress(answer) if isinstance(answer, Progress) else encode_failure(answer)
            self._send("progress", {"order": order, "answer": encoded})

        def now_ns() -> int:
            return time.monotonic_ns() - origin_ns  # the controller's run time, since both have the machine's clock

        self._running = order
        try:
            plan = decode_plan(values["items"], message.buffers)
            self._executor.begin(plan, values["max_steps"], answered, now_ns, on_step if values["steps"] else None)
        except Exception as problem:  # a plan that does not fit: whoever made it hears so
            answered(ExecutorFailed(f"executor {self._name}: {type(problem).__name__}: {problem}"), 0)

    def _interrupt(self, message: Message) -> None:
        if self._running == message.values["run"]:  # else it ended before the next one began
            self._executor.interrupt()

    def _measure(self, message: Message) -> None:
        self._keep(aio.spawn(self._time(message.values), "measure"))

    async def _time(self, values: Mapping[str, Any]) -> None:
        """Times of a chunk; or, where those are given, the cost model that they and times of a step make."""
        executor, told = self._executor, values.get("chunk_ns")
        if told is None:
            found: Any = await executor.on_thread(lambda: time_chunks(executor))
        else:
            one_ns, full_ns, far_ns = await executor.on_thread(lambda: time_steps(executor))
            found = dataclasses.asdict(fit(executor.geometry, tuple(told), (one_ns, full_ns), far_ns))
        if self._config["backend"]["poison"]:
            executor.poison(range(executor.geometry.pages))
        self._send("measured", {"order": values["order"], "answer": found})

    # Bytes

    def _poison(self, message: Message) -> None:
        slots = list(message.values["slots"])
        if message.values["tier"] == Tier.HBM:
            self._executor.poison(slots)
        else:
            self._memory.buffer()[slots] = POISON_BYTE

    def _peer(self, message: Message) -> None:
        """Another node's host memory, and how to reach it."""
        values = message.values
        self._peers[values["node"]] = RegionDescriptor.from_json(values["region"]), values["stride_bytes"]

    def _copy(self, message: Message) -> None:
        values = message.values
        node, tier, slots = values["source"]
        target_tier, target_slots = values["target"]
        answered = partial(self._copied, values["order"])
        if node != self._node:
            self._fetch(node, slots, target_slots, values["checksum"], answered)
            return
        copy = Copy(self._region(tier, slots), self._region(target_tier, target_slots), checksum=values["checksum"])
        transport = self._device if Tier.HBM in (tier, target_tier) else self._local
        transport.submit([copy]).when_answered(answered)

    def _region(self, tier: str, slots: Sequence[int]) -> Region:
        """Whose the slots are the controller knows; here they only must not have lost what they held."""
        if tier == Tier.HBM:
            return PageRegion(self._pages, tuple(slots), self._pages.epoch, self._executor, 0)
        return self._memory.regions(slots)

    def _fetch(
        self,
        node: str,
        slots: Sequence[int],
        targets: Sequence[int],
        checksum: bool,
        answered: Callable[[list[CopyResult]], None],
    ) -> None:
        """Read blocks of another node's host memory into ours."""
        remote, stride = self._peers[node]
        ours, nbytes = self._memory.area.stride_bytes, self._memory.block_bytes
        spans = Spans.of(
            (target * ours, source * stride, nbytes) for source, target in zip(slots, targets, strict=True)
        )

        def done(pending: Pending) -> None:
            results = pending.result()
            error = next(iter(results.errors.values()), None)
            answered([CopyResult(error, () if error is not None else results.checksums if checksum else ())])

        deadline_s = self._config["deadline_s"]
        self._endpoint.read(self._exposed, remote, spans, deadline_s=deadline_s, checksums=checksum).add_done_callback(
            cast("Callable[[Any], object]", done)
        )

    def _copied(self, order: int, results: list[CopyResult]) -> None:
        self._send("copied", {"order": order, "answer": encode_results(results)})

    def _figures(self, message: Message) -> None:
        tally, stats = self._executor.tally, self._endpoint.stats()
        answer = {
            "world": self.world.figures(),
            "padding": {
                phase: [count.asked, count.computed]
                for phase, count in (("prefill", tally.prefill), ("decode", tally.decode))
            },
            "bytes_read": stats.bytes_read,
            "refused": stats.refused,
        }
        self._send("figures", {"order": message.values["order"], "answer": answer})

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks[task] = None
        task.add_done_callback(self._let_go)

    def _let_go(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled():
            task.result()  # a mistake of ours ends the worker, which its controller notices
