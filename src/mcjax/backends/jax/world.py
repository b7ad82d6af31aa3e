"""The real world: JAX on this machine's devices, real bytes, real time. One instance a device and thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import jax

from mcjax.backends.base import WorldInputs
from mcjax.backends.jax.calibrate import calibrate, measure_link
from mcjax.backends.jax.device_store import DevicePages
from mcjax.backends.jax.device_transport import Device
from mcjax.backends.jax.executor import JaxExecutor
from mcjax.backends.jax.programs import Geometry, Programs
from mcjax.cost.base import CostModel
from mcjax.cost.model_shape import ModelShape
from mcjax.engine.base import InstanceParts
from mcjax.errors import ConfigError
from mcjax.kvpool.stores.dram import DramStore
from mcjax.models import catalogue
from mcjax.transfer.base import Transport
from mcjax.transfer.transports.local import Local
from mcjax.types import KVFormat, NullRecorder, Recorder, Role

T = TypeVar("T")


class JaxWorld:
    """Implements `mcjax.backends.base.World` with the model of a shape: its checkpoint, or built-in weights of `seed`.

    `pages`: device pages of each instance; `pool_blocks`: DRAM blocks of each node; `poison`: overwrite what is
    released with NaN; `devices`: how many CPU devices to ask JAX for (instance k computes on device k modulo what there
    is). Make the world before anything else uses JAX: the number of CPU devices is fixed at its first use.
    """

    name = "jax"
    virtual = False
    keeps_tokens = True
    shares_decoded = False  # a decoded block's bits differ from what a prefill of the same tokens would give

    def __init__(
        self,
        shape: ModelShape,
        *,
        seed: int = 0,
        block_tokens: int = 16,
        chunk_tokens: int = 128,
        max_batch: int = 8,
        max_context_tokens: int = 2048,
        pages: int = 512,
        pool_blocks: int = 1024,
        poison: bool = False,
        numerics: str = "invariant",
        attention: str = "blockwise",
        devices: int = 2,
        recorder: Recorder | None = None,
    ):
        if numerics != "invariant":
            raise ConfigError("backend.numerics", numerics, "not supported", ("invariant",))
        if max_context_tokens > shape.max_context_tokens:
            limit = f"model {shape.name} stops at {shape.max_context_tokens}"
            raise ConfigError("backend.max_context_tokens", max_context_tokens, limit)
        self._shape = shape
        self._fingerprint = catalogue.fingerprint(shape, seed)
        self._seed = seed
        self._geometry = Geometry(pages, block_tokens, max_batch, chunk_tokens, max_context_tokens)
        if pages < self._geometry.table_width:
            raise ConfigError(
                "backend.pages", pages, f"one context of {max_context_tokens} tokens takes {self._geometry.table_width}"
            )
        self._pool_blocks = pool_blocks
        self._poison = poison
        self._attention = attention
        self._recorder = recorder or NullRecorder()
        _ask_for_cpu_devices(devices)
        self._devices = jax.local_devices()[: max(1, devices)]
        self._made = 0
        self._programs: Programs | None = None
        self._executors: dict[str, JaxExecutor] = {}
        self._stores: dict[str, DramStore] = {}
        self._device = Device(self._recorder)
        self._local = Local(self._recorder)
        self._cost: CostModel | None = None
        self._link: tuple[float, float] | None = None

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `main` on a stock asyncio loop; whatever ends it, no thread is left behind."""
        try:
            # A plain loop, whatever policy is installed: `aio.WallClock` looks at its ready queue.
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                return runner.run(main())
        finally:
            for name in list(self._executors):
                self._executors.pop(name).stop()
            self._local.close()

    def devices(self) -> list[str]:
        return [f"{device.platform}:{device.id} {device.device_kind}" for device in self._devices]

    def kv_format(self) -> KVFormat:
        """One group of full attention; the fingerprint names weights and dtype."""
        return self._shape.kv_format(self._geometry.page_tokens, self._fingerprint)

    def cost(self) -> CostModel:
        """What `prepare` measured. Raises `RuntimeError` before."""
        if self._cost is None:
            raise RuntimeError("the cost model is measured by prepare()")
        return self._cost

    def link(self) -> tuple[float, float]:
        """Bytes a second and latency between nodes, as `prepare` measured them."""
        if self._link is None:
            raise RuntimeError("the link is measured by prepare()")
        return self._link

    async def prepare(self, instances: list[tuple[str, Role]], report: Callable[[str, float], None]) -> None:
        """Make the weights, compile for every device in use, measure one executor."""
        stages = len(instances) + 2
        report("weights", 0.0)
        self._model_programs()
        for done, (name, role) in enumerate(instances, start=1):
            report(f"compiling for {name}", done / stages)
            await self._executor(name).warm_up(prefill=role is not Role.DECODE, decode=role is not Role.PREFILL)
        prefill = next((name for name, role in instances if role is not Role.DECODE), None)
        decode = next((name for name, role in instances if role is not Role.PREFILL), None)
        if prefill is not None and decode is not None:
            report("measuring", 1 - 1 / stages)
            computes, decodes = self._executor(prefill), self._executor(decode)
            self._cost = await calibrate(computes, decodes, self._recorder)
            if self._poison:
                for executor in (computes, decodes):
                    executor.poison(range(self._geometry.pages))
        self._link = measure_link(self._recorder)
        self._record_shape()
        report("ready", 1.0)

    def _record_shape(self) -> None:
        """What a replay must know of this world, as the only outcome of the mechanism `world`."""
        kv_format, geometry = self.kv_format(), self._geometry
        shape = {
            "fingerprint": kv_format.fingerprint,
            "bytes_per_token": kv_format.bytes_per_token,
            "page_tokens": geometry.page_tokens,
            "pages": geometry.pages,
            "pool_blocks": self._pool_blocks,
            "max_batch": geometry.max_batch,
            "chunk_tokens": geometry.chunk_tokens,
            "max_context_tokens": geometry.max_context_tokens,
        }
        self._recorder.outcome(0, "world", 0, shape)

    def instance(self, name: str, node: str, role: Role) -> InstanceParts:
        """The executor and the pages of `name`. One that `prepare` did not know compiles at its first step."""
        executor = self._executor(name)
        return InstanceParts(executor, DevicePages(node, executor, self._poison))

    def pool_store(self, node: str) -> DramStore:
        """The DRAM store of a node, allocated when first asked for."""
        if node not in self._stores:
            block_bytes = self.kv_format().block_bytes
            self._stores[node] = DramStore(node, self._pool_blocks, block_bytes, poison=self._poison)
        return self._stores[node]

    def transports(self) -> list[Transport]:
        return [self._device, self._local]

    async def remove(self, instance: str) -> None:
        """End the instance's thread after the step under way, and free its pages."""
        executor = self._executors.pop(instance, None)
        if executor is not None:
            await executor.close()

    async def close(self) -> None:
        """End every thread, after what was submitted."""
        for name in list(self._executors):
            await self.remove(name)
        self._local.close()

    def _model_programs(self) -> Programs:
        if self._programs is None:
            loaded = catalogue.load(self._shape, self._seed, self._geometry.max_context_tokens)
            self._programs = Programs(loaded.model, self._geometry, self._attention)
        return self._programs

    def _executor(self, name: str) -> JaxExecutor:
        if name not in self._executors:
            device = self._devices[self._made % len(self._devices)]
            self._made += 1
            self._executors[name] = JaxExecutor(name, self._model_programs(), device, self._recorder)
        return self._executors[name]


def _ask_for_cpu_devices(count: int) -> None:
    if count < 1:
        raise ConfigError("backend.devices", count, "must be at least 1")
    # Once JAX is in use the number is fixed: instances then share the devices there are.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def make_world(
    inputs: WorldInputs,
    numerics: str,
    chunk_tokens: int,
    max_batch: int,
    max_context_tokens: int,
    pages: int,
    pool_blocks: int,
    poison: bool,
) -> JaxWorld:
    """The real world of a run's config (`conf/backend/jax.yaml`)."""
    return JaxWorld(
        inputs.model,
        seed=inputs.seed,
        block_tokens=inputs.block_tokens,
        chunk_tokens=chunk_tokens,
        max_batch=max_batch,
        max_context_tokens=max_context_tokens,
        pages=pages,
        pool_blocks=pool_blocks,
        poison=poison,
        numerics=numerics,
        attention=inputs.attention,
        devices=inputs.instances,
        recorder=inputs.recorder,
    )
