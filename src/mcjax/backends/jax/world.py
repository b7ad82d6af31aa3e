"""The real world: JAX on this machine's devices, real bytes, real time. Each instance has devices and a thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import jax

from mcjax import aio
from mcjax.backends.at_rest import at_rest
from mcjax.backends.base import Tiers, WorldInputs
from mcjax.backends.jax.buckets import chunks, doublings, padding
from mcjax.backends.jax.calibrate import calibrate, measure_link
from mcjax.backends.jax.compilation import AUTO, Watch, use_cache
from mcjax.backends.jax.device_store import DevicePages
from mcjax.backends.jax.device_transport import Device
from mcjax.backends.jax.executor import JaxExecutor
from mcjax.backends.jax.judge import Judge, reference_geometry
from mcjax.backends.jax.memory import DeviceMemory, array_bytes, workspace_bytes
from mcjax.backends.jax.mesh_transport import Mesh
from mcjax.backends.jax.meshes import allot, check_divides, read_meshes
from mcjax.backends.jax.numerics import NUMERICS, TOLERANCES
from mcjax.backends.jax.packers import compiled_packer
from mcjax.backends.jax.placed_weights import PlacedWeights
from mcjax.backends.jax.placement import Place
from mcjax.backends.jax.programs import Geometry, Programs
from mcjax.backends.jax.sizing import buckets_of, device_name, pages_that_fit, widths_for
from mcjax.backends.jax.ssd_tier import SsdTier
from mcjax.backends.jax.tally import wasted
from mcjax.backends.jax.warm_up import warm_up_jobs
from mcjax.cost.base import CostModel
from mcjax.cost.model_shape import ModelShape
from mcjax.engine.base import InstanceParts
from mcjax.engine.cluster_spec import node_of
from mcjax.errors import ConfigError
from mcjax.kernels.choice import KernelChoice
from mcjax.kernels.serves import check_serves
from mcjax.kvpool.base import BlockStore
from mcjax.kvpool.keys import KeyTable
from mcjax.kvpool.stores.host import HostStore
from mcjax.models import catalogue
from mcjax.transfer.base import Transport
from mcjax.transfer.transports.local import Local
from mcjax.types import KVFormat, NullRecorder, Recorder, Role

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class JaxWorld:
    """Implements `mcjax.backends.base.World` with the model of a shape: its checkpoint, or built-in weights of `seed`.

    `pages`: device pages of each instance (None: as many as fit); `pool_blocks`: DRAM blocks of each node; `poison`:
    overwrite what is released with NaN; `roles`: of all instances to come, in the order in which they are made; `mesh`:
    devices of an instance, by role (`meshes.read_meshes`); `uncached_tokens`: of a sample of prompts, for the choice of
    shapes; `tiers`: those beside plain host memory; `table`: the run's names of blocks. Make the world before anything
    else uses JAX: the number of CPU devices is fixed at its first use.
    """

    name = "jax"
    virtual = False
    keeps_tokens = True

    def __init__(
        self,
        shape: ModelShape,
        *,
        seed: int = 0,
        block_tokens: int = 16,
        chunk_tokens: int = 128,
        max_batch: int = 8,
        max_context_tokens: int = 2048,
        pages: int | None = 512,
        pool_blocks: int = 1024,
        poison: bool = False,
        numerics: str = "invariant",
        tolerance: float | None = None,
        prefill_widths: Sequence[int] | str = AUTO,
        decode_batches: Sequence[int] | str = AUTO,
        fused_steps: int = 1,
        mesh: object = None,
        memory_share: float = 0.9,
        memory_bytes: int | None = None,
        compilation_cache: str | None = None,
        kernels: KernelChoice | None = None,
        roles: Sequence[Role] = (Role.PREFILL, Role.DECODE),
        uncached_tokens: Callable[[], Sequence[int]] = lambda: (),
        tiers: Tiers | None = None,
        table: KeyTable | None = None,
        recorder: Recorder | None = None,
    ):
        if numerics not in NUMERICS:
            raise ConfigError("backend.numerics", numerics, "not supported", NUMERICS)
        if numerics == "invariant" and fused_steps != 1:
            raise ConfigError("backend.fused_steps", fused_steps, "numerics=invariant never fuses", [1])
        if max_context_tokens > shape.max_context_tokens:
            limit = f"model {shape.name} stops at {shape.max_context_tokens}"
            raise ConfigError("backend.max_context_tokens", max_context_tokens, limit)
        self._shape = shape
        self._source = catalogue.source(shape, seed)  # first, since a checkpoint may be refused
        self._fingerprint = catalogue.fingerprint(shape, seed)
        self.tolerance = TOLERANCES[shape.dtype_bytes] if tolerance is None else tolerance
        """By how much a logit may differ from the reference engine's."""
        if not self.tolerance > 0:
            raise ConfigError("backend.tolerance", tolerance, "must be more than 0")
        self.shares_decoded = numerics == "fast"  # else a decoded block's bits differ from what a prefill would give
        self._sample = chunks(uncached_tokens(), chunk_tokens) if numerics == "fast" else []
        fast = numerics == "fast"
        self._wanted_pages, self._memory_share, self._memory_bytes = pages, memory_share, memory_bytes
        self._geometry = Geometry(
            pages or 1,
            block_tokens,
            max_batch,
            chunk_tokens,
            max_context_tokens,
            widths=buckets_of("prefill_widths", prefill_widths, fast, lambda: widths_for(self._sample, chunk_tokens)),
            fused_steps=fused_steps,
            batches=buckets_of("decode_batches", decode_batches, fast, lambda: doublings(max_batch)),
        )
        if pages is not None and pages < self._geometry.table_width:
            raise ConfigError(
                "backend.pages", pages, f"one context of {max_context_tokens} tokens takes {self._geometry.table_width}"
            )
        self._pool_blocks = pool_blocks
        self._poison = poison
        self._kernels = kernels or KernelChoice()
        check_serves(self._kernels, shape)
        self._recorder = recorder or NullRecorder()
        meshes = read_meshes(mesh).each(roles)
        for axes in sorted({*meshes}):
            check_divides(shape, axes)
        sizes = [axes.size for axes in meshes]
        use_cache(compilation_cache)
        _ask_for_cpu_devices(sum(sizes))
        self._devices = jax.local_devices()
        groups = allot(sizes, len(self._devices))
        self._groups = [
            Place(tuple(self._devices[index] for index in group), axes.expert)
            for group, axes in zip(groups, meshes, strict=True)
        ]
        self._places: dict[str, Place] = {}
        self._placed: PlacedWeights | None = None
        self._programs: Programs | None = None
        self._executors: dict[str, JaxExecutor] = {}
        self._made: list[JaxExecutor] = []
        self._stores: dict[str, HostStore] = {}
        self._device = Device(self._recorder)
        self._mesh = Mesh(self._recorder)
        self._local = Local(self._recorder)
        self._tiers = tiers or Tiers()
        self._rest = at_rest(self._tiers, shape, self.kv_format(), compiled_packer)
        dram, on_ssd = self._rest.dram, self._rest.ssd
        self._ssd = SsdTier(self._tiers, self.kv_format(), table or KeyTable(), self._recorder, on_ssd, dram.lossy)
        self._cost: CostModel | None = None
        self._link: tuple[float, float] | None = None
        self._ssd_speed: tuple[float, float] | None = None
        self._watch = Watch(self._recorder)

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
            self._ssd.close()
            self._watch.close()
            self._close_stores()

    def devices(self) -> list[str]:
        used = dict.fromkeys(device for place in self._groups for device in place.devices)
        return [f"{device_name(device)} {device.device_kind}" for device in used]

    def kv_format(self) -> KVFormat:
        """The model's groups; the fingerprint names weights and dtype."""
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

    def ssd(self) -> tuple[float, float] | None:
        """The same of reading from a node's SSD; None where there is none."""
        return self._ssd_speed

    async def prepare(self, instances: list[tuple[str, Role]], report: Callable[[str, float], None]) -> None:
        """Make the weights, compile all that the instances will run, measure one of each kind.

        `instances` are those that join later too: nothing is compiled once this is done, or it is told of.
        """
        self._ssd.open([node_of(name) for name, _ in instances])  # first, since a directory may refuse
        if self._kernels.pallas and jax.default_backend() == "cpu":
            keys = ", ".join(f"kernels.{key}" for key in self._kernels.pallas)
            _logger.warning(
                "%s=pallas: interpreted on a CPU: right, and very slow (backend.pages=128 helps: steps copy pages)",
                keys,
            )
        share = 0.0
        report("weights", share)
        self._weights().told = lambda what: report(what, share)
        places = {name: self._place(name) for name, _ in instances}
        pages = pages_that_fit(
            lambda geometry: Programs(self._weights(), geometry, self._kernels),
            self._geometry,
            self._wanted_pages,
            [(places[name], role) for name, role in instances],
            self._limit_bytes,
            self._memory_share,
        )
        self._geometry = dataclasses.replace(self._geometry, pages=pages)
        self._programs = None
        jobs = [
            (name, what, job)
            for name, role in instances
            for what, job in warm_up_jobs(self._executor(name), role is not Role.DECODE, role is not Role.PREFILL)
        ]
        for done, (name, what, job) in enumerate(jobs):
            share = (done + 1) / (len(jobs) + 2)
            report(f"compiling for {name}: {what} ({done + 1} of {len(jobs)})", share)
            await self._executor(name).on_thread(job)
        prefill = next((name for name, role in instances if role is not Role.DECODE), None)
        decode = next((name for name, role in instances if role is not Role.PREFILL), None)
        if prefill is not None and decode is not None:
            report("measuring", 1 - 1 / (len(jobs) + 2))
            computes, decodes = self._executor(prefill), self._executor(decode)
            self._cost = await calibrate(computes, decodes, self._recorder)
            if self._poison:
                for executor in (computes, decodes):
                    executor.poison(range(self._geometry.pages))
        self._link = measure_link(self._recorder)
        self._ssd_speed = await self._ssd.measure()
        self._record_shape()
        self._watch.seal(aio.clock())
        report("ready", 1.0)

    def _limit_bytes(self, device: Any) -> int | None:
        return self._memory_bytes or (device.memory_stats() or {}).get("bytes_limit")

    def reference(self) -> Judge:
        """What the tokens of a run are held against where they may differ from it by rounding. In no run's loop."""
        kernels = self._kernels if self._kernels.exact else KernelChoice()
        programs = Programs(self._weights(), reference_geometry(self._geometry), kernels)
        return Judge(programs, self._devices[0])

    def figures(self) -> dict[str, Any]:
        """What `summary.json` says of this world: late compilations, memory of each instance, padding, the SSDs."""
        tallies = [executor.tally for executor in self._made]
        prefill = [tally.prefill for tally in tallies]
        decode = [tally.decode for tally in tallies]
        return {
            "compilations_after_warm_up": len(self._watch.late),
            "host_memory": {node: self._host_memory(store) for node, store in self._stores.items()},
            "device_memory": {made.name: dataclasses.asdict(self.memory(made.name)) for made in self._made},
            "padding": {
                "prefill": {
                    "widths": list(self._geometry.widths),
                    "expected": padding(self._sample, self._geometry.widths) if self._sample else None,
                    "actual": wasted(prefill),
                },
                "decode": {"batches": list(self._geometry.batches), "actual": wasted(decode)},
            },
            "ssd": self._ssd.figures(),
        }

    @staticmethod
    def _host_memory(store: HostStore) -> dict[str, Any]:
        slab = store.slab
        return {
            "bytes": slab.nbytes,
            "pages": slab.pages,
            "numa_node": slab.numa_node,
            "encoding": store.packer.name,
        }

    def memory(self, name: str) -> DeviceMemory:
        """What an instance takes of its devices. The workspace is that of the programs compiled so far."""
        place = self._places[name]
        programs = self._model_programs().on(place)
        return DeviceMemory(
            tuple(device_name(device) for device in place.devices),
            array_bytes(programs.weights),
            programs.page_bytes * (self._geometry.pages + 1),
            workspace_bytes(programs.compiled),
        )

    def _record_shape(self) -> None:
        """What a replay must know of this world, as the only outcome of the mechanism `world`."""
        kv_format, geometry = self.kv_format(), self._geometry
        shape = {
            "fingerprint": kv_format.fingerprint,
            "bytes_per_token": kv_format.bytes_per_token,
            "groups": [dataclasses.asdict(group) for group in kv_format.groups],
            "page_tokens": geometry.page_tokens,
            "pages": geometry.pages,
            "pool_blocks": self._pool_blocks,
            "ssd_blocks": self._ssd.blocks,
            "packers": [
                {"name": packer.name, "lossy": packer.lossy, "packed_bytes": packer.packed_bytes}
                for packer in (self._rest.dram, self._rest.ssd)
            ],
            "max_batch": geometry.max_batch,
            "chunk_tokens": geometry.chunk_tokens,
            "max_context_tokens": geometry.max_context_tokens,
            "shares_decoded": self.shares_decoded,
        }
        self._recorder.outcome(0, "world", 0, shape)

    def instance(self, name: str, node: str, role: Role) -> InstanceParts:
        """The executor and the pages of `name`. One that `prepare` did not know compiles at its first step."""
        executor = self._executor(name)
        pages = DevicePages(node, executor, self._poison)
        pages.layout = self._rest.computed  # a gather hands whole blocks over, whatever the mesh
        return InstanceParts(executor, pages)

    def pool_store(self, node: str) -> HostStore:
        """The DRAM store of a node, allocated when first asked for."""
        if node not in self._stores:
            packer, tiers = self._rest.dram, self._tiers
            store = self._stores[node] = HostStore(
                node,
                self._pool_blocks,
                packer.packed_bytes,
                poison=self._poison,
                packer=packer,
                huge_pages=tiers.huge_pages,
                numa_node=tiers.numa_node,
            )
            store.layout = self._rest.layout(packer)
        return self._stores[node]

    def ssd_store(self, node: str) -> BlockStore | None:
        """The SSD store of a node, in a folder of its own. Raises `StoreError` for one that cannot be used."""
        store = self._ssd.store(node)
        if store is not None:
            store.layout = self._rest.layout(self._rest.ssd)
        return store

    def transports(self) -> list[Transport]:
        return [self._device, self._local, self._mesh, *self._ssd.transports]

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
        self._ssd.close()
        self._watch.close()
        self._close_stores()

    def _close_stores(self) -> None:
        """Give host memory back, now that no thread is left that could read or write it. Harmless when repeated."""
        for store in self._stores.values():
            store.close()

    def _weights(self) -> PlacedWeights:
        """Of the model: each place's are brought there when it is first asked for, and shared by all programs."""
        if self._placed is None:
            outline = catalogue.outline(self._shape, self._geometry.max_context_tokens)
            self._placed = PlacedWeights(outline, self._source)
        return self._placed

    def _model_programs(self) -> Programs:
        if self._programs is None:
            self._programs = Programs(self._weights(), self._geometry, self._kernels)
        return self._programs

    def _place(self, name: str) -> Place:
        """Where an instance computes: the next group, or, of those that nobody spoke of, the device of another."""
        if name not in self._places:
            made = len(self._places)
            self._places[name] = self._groups[made % len(self._groups)]
        return self._places[name]

    def _executor(self, name: str) -> JaxExecutor:
        if name not in self._executors:
            executor = JaxExecutor(name, self._model_programs(), self._place(name), self._recorder)
            self._executors[name] = executor
            self._made.append(executor)
        return self._executors[name]


def _ask_for_cpu_devices(count: int) -> None:
    # Once JAX is in use the number is fixed: what there is must then do.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", max(1, count, jax.config.values["jax_num_cpu_devices"]))


def make_world(
    inputs: WorldInputs,
    numerics: str,
    tolerance: float | None,
    chunk_tokens: int,
    prefill_widths: Sequence[int] | str,
    max_batch: int,
    decode_batches: Sequence[int] | str,
    fused_steps: int,
    max_context_tokens: int,
    pages: int | None,
    memory_share: float,
    memory_bytes: int | None,
    pool_blocks: int,
    mesh: object,
    compilation_cache: str | None,
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
        tolerance=tolerance,
        prefill_widths=prefill_widths,
        decode_batches=decode_batches,
        fused_steps=fused_steps,
        mesh=mesh,
        memory_share=memory_share,
        memory_bytes=memory_bytes,
        compilation_cache=compilation_cache,
        kernels=inputs.kernels,
        roles=inputs.roles,
        uncached_tokens=inputs.uncached_tokens,
        tiers=inputs.tiers,
        table=inputs.table,
        recorder=inputs.recorder,
    )
