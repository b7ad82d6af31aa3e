"""The few compiled programs that an executor runs. Each has one shape, so each row's bits depend on that row alone.

model: a batch of rows of one width, to logits (a chunk of a prompt is one row, a decode step one token a row). sampler:
logits to tokens, plainly or with all that a request may ask for. gather, scatter, duplicate: a fixed number of whole
pages, for transfers. new pages: their first content. Compiled ahead of time, once a place (a device, or a few of them);
any other shape is refused, not recompiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped
from numpy.typing import NDArray

from mcjax.backends.jax.buckets import ladder, smallest
from mcjax.backends.jax.memory import NEW_PAGES
from mcjax.backends.jax.placed_weights import PlacedWeights
from mcjax.backends.jax.placement import Device, Place
from mcjax.backends.jax.sampling import FULL_NUMBERS, FULL_WORDS, sample, sample_fully
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from mcjax.kernels.attention.pages import block_dtype, page_dtype
from mcjax.kernels.base import Attention
from mcjax.kernels.choice import KernelChoice
from mcjax.kernels.sets import kernel_set
from mcjax.models.decoder import Decoder

HEADER = 2
"""Words before the tokens and the page table in a packed row: see `pack_row`."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The fixed sizes of an instance's programs. `pages` excludes the scratch page, whose index is `pages`."""

    pages: int
    page_tokens: int
    max_batch: int
    chunk_tokens: int
    max_context_tokens: int
    move_pages: int = 8
    """Pages moved by one call of gather or scatter: wide enough to amortise a call, small enough to pad cheaply."""
    widths: tuple[int, ...] = ()
    """Widths of the prefill programs, ascending; the last is `chunk_tokens`, the only one if none is given."""
    fused_steps: int = 1
    """Decode steps in one call, where nothing is asked of the host between them."""
    batches: tuple[int, ...] = ()
    """Rows of the decode programs, ascending; the last is `max_batch`, the only one if none is given."""

    def __post_init__(self) -> None:
        for name in (
            "pages",
            "page_tokens",
            "max_batch",
            "chunk_tokens",
            "max_context_tokens",
            "move_pages",
            "fused_steps",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"backend.{name}", getattr(self, name), "must be at least 1")
        object.__setattr__(self, "widths", ladder("backend.prefill_widths", self.widths, self.chunk_tokens))
        object.__setattr__(self, "batches", ladder("backend.decode_batches", self.batches, self.max_batch))

    def width(self, tokens: int) -> int:
        """The narrowest prefill program that takes so many tokens."""
        return smallest(self.widths, tokens)

    def batch(self, rows: int) -> int:
        """The smallest decode program that takes so many rows."""
        return smallest(self.batches, rows)

    @property
    def table_width(self) -> int:
        """Pages that hold the longest context."""
        return -(-self.max_context_tokens // self.page_tokens)


def pack_row(
    width: int, length: int, start: int, tokens: NDArray[np.int32], pages: list[int], geometry: Geometry
) -> NDArray[np.int32]:
    """`[HEADER + width + N]` int32: length, start, `width` tokens, page table.

    One array a call, since each array handed to a device costs more than its bytes. Unused table entries name the
    scratch page.
    """
    row = np.zeros(HEADER + width + geometry.table_width, dtype=np.int32)
    row[0], row[1] = length, start
    row[HEADER : HEADER + len(tokens)] = tokens
    row[HEADER + width :] = geometry.pages
    row[HEADER + width : HEADER + width + len(pages)] = pages
    return row


class Programs:
    """A model's step and page functions for one geometry; `on(device)` compiles them. Shared by all executors.

    The model may be abstract (`nnx.eval_shape`): then its programs compile, also for devices that are not there
    (`platform` names theirs), and cannot be run. Programs that are given the same `PlacedWeights` share them.
    """

    def __init__(
        self,
        model: Decoder | PlacedWeights,
        geometry: Geometry,
        kernels: KernelChoice | None = None,
        platform: str | None = None,
    ):
        self.shape: ModelShape = model.shape
        self.geometry = geometry
        self.kernels = kernels or KernelChoice()
        platform = platform or jax.default_backend()
        self._flat = platform == "cpu"
        self.block_shape = model.shape.page_shape(geometry.page_tokens)
        """Of a page as it leaves the device."""
        self.block_dtype: np.dtype[Any] = block_dtype(model.shape.dtype, platform)
        self.page_dtype: np.dtype[Any] = page_dtype(model.shape.dtype, self.kernels.pages, platform)
        self.unwritten = np.array(np.nan, jnp.dtype(model.shape.dtype)).view(self.block_dtype)
        """NaN, as blocks hold it."""
        self.page_bytes = int(np.prod(self.block_shape)) * self.block_dtype.itemsize
        self.weights = model if isinstance(model, PlacedWeights) else PlacedWeights(model)
        self.leaves, self.paths = self.weights.leaves, self.weights.paths
        self._lock = threading.Lock()
        self._places: dict[Place, DevicePrograms] = {}

    def pages_shape(self, count: int) -> tuple[int, ...]:
        """Of an array of so many pages, as kernels want it."""
        layers, entries, page_tokens, kv_heads, head_dim = self.block_shape
        if self.kernels.pages == "heads_first":
            return count, layers, entries, kv_heads, page_tokens, head_dim
        return count, *self.block_shape

    def new_pages(self, where: Device | Place) -> Shaped[Array, "P+1 L C ..."]:
        """Pages and the scratch page, all NaN: whoever reads what nobody wrote shows it."""
        return self.on(where).new_pages()

    def on(self, where: Device | Place) -> DevicePrograms:
        """The programs of a device or place. Thread-safe."""
        place = Place.of(where)
        with self._lock:
            if place not in self._places:
                self._places[place] = DevicePrograms(self, place)
            return self._places[place]

    def logits(
        self,
        width: int,
        attend: Attention,
        weights: list[Array],
        pages: Shaped[Array, "P+1 L C ..."],
        rows: Int[Array, "B R"],
    ) -> tuple[Float[Array, "B V"], Shaped[Array, "P+1 L C ..."]]:
        """The model's step for packed rows (`pack_row`)."""
        model = nnx.merge(self.weights.graph, jax.tree.unflatten(self.weights.tree, weights))
        lengths, starts = rows[:, 0], rows[:, 1]
        tokens, table = rows[:, HEADER : HEADER + width], rows[:, HEADER + width :]
        step = jnp.arange(width, dtype=jnp.int32)[None, :]
        positions = jnp.where(step < lengths[:, None], starts[:, None] + step, -1)
        return model(tokens, positions, pages, table, lengths, attend, self._flat)


class DevicePrograms:
    """The programs and weights of one place. Each is compiled at first use (seconds), ahead of its first call.

    A program that returns pages consumes those it was given.
    """

    def __init__(self, programs: Programs, place: Place):
        self.place = place
        shape = programs.shape
        self.weights = programs.weights.on(place)
        self._programs = programs
        self._kernels = kernel_set(programs.kernels, place.site(shape))
        self._pages_sharding = place.pages(shape, self._kernels.pages)
        self._paged = place.pages_format(shape, self._kernels.pages)
        self._blocks = place.blocks(shape)
        self._lock = threading.Lock()
        self.compiled: dict[str, Any] = {}
        """`jax.stages.Compiled` of each, by name."""

    @property
    def page_bytes(self) -> int:
        """Of one page, as far as it lies on each device of the place."""
        shape = self._programs.pages_shape(1)
        return int(np.prod(self._pages_sharding.shard_shape(shape))) * self._programs.page_dtype.itemsize

    @property
    def count(self) -> int:
        """Programs compiled so far."""
        return len(self.compiled)

    def model(self, batch: int, width: int) -> Callable[..., tuple[Array, Array]]:
        """`(weights, pages, rows [batch, HEADER + width + N]) -> (logits [batch, V], pages)`"""
        return self._get(f"model {batch}x{width}", lambda name: self._model(name, batch, width))

    def fused(self, batch: int) -> Callable[..., tuple[Array, Array]]:
        """`fused_steps` of model and plain sampler:
        `(weights, pages, rows, words, temperatures) -> ([K, batch, 2], pages)`"""
        return self._get(f"fused {batch}", lambda name: self._fused(name, batch))

    def sampler(self, batch: int) -> Callable[..., Array]:
        """`(logits [batch, V], words [batch, 3], temperatures [batch]) -> [batch, 2]`, see `sampling.sample`"""
        return self._get(f"sampler {batch}", lambda name: self._sampler(name, batch))

    def full_sampler(self, batch: int) -> Callable[..., Array]:
        """`(logits [batch, V], words [batch, FULL_WORDS + max_context_tokens], numbers [batch, 6]) -> [batch, 3 + 2K]`,
        see `sampling.sample_fully`"""
        return self._get(f"full sampler {batch}", lambda name: self._full_sampler(name, batch))

    @property
    def gather(self) -> Callable[..., Array]:
        """`(pages, slots [W]) -> [W, L, 2, page, Hkv, D]`"""

        def take(pages: Array, slots: Array) -> Array:
            return _bits(self._kernels.kv_pack.pack(pages, slots), self._programs.block_dtype)

        return self._get("gather", lambda name: self._jit(name, take, out=self._blocks).lower(*self._move()[:2]))

    @property
    def scatter(self) -> Callable[..., Array]:
        """`(pages, slots [W], blocks [W, L, 2, page, Hkv, D]) -> pages`"""

        def put(pages: Array, slots: Array, blocks: Array) -> Array:
            return self._kernels.kv_pack.unpack(pages, slots, _bits(blocks, self._programs.page_dtype))

        return self._get("scatter", lambda name: self._jit(name, put, out=self._paged, donate=0).lower(*self._move()))

    @property
    def new_pages(self) -> Callable[[], Array]:
        """`() -> pages`, all NaN"""
        spec = self._pages(self._programs.geometry.pages + 1)

        def fill() -> Array:
            return jnp.full(spec.shape, self._programs.unwritten.view(spec.dtype), spec.dtype)

        return self._get(NEW_PAGES, lambda name: self._jit(name, fill, out=self._paged).lower())

    @property
    def duplicate(self) -> Callable[..., Array]:
        """`(pages, sources [W], targets [W]) -> pages`"""

        def put(pages: Array, sources: Array, targets: Array) -> Array:
            return pages.at[targets].set(pages[sources])

        pages, slots, _ = self._move()
        return self._get(
            "duplicate", lambda name: self._jit(name, put, out=self._paged, donate=0).lower(pages, slots, slots)
        )

    def _get(self, name: str, lower: Callable[[str], Any]) -> Any:
        found = self.compiled.get(name)
        if found is None:
            with self._lock:
                if name not in self.compiled:
                    self.compiled[name] = lower(name).compile()
                found = self.compiled[name]
        return found

    def _jit(self, name: str, function: Callable[..., Any], out: Any, donate: int | None = None) -> Any:
        """`function` under a name that its compilation is reported by, its outputs laid out as `out` says."""

        def named(*arguments: Any) -> Any:
            return function(*arguments)

        named.__name__ = name.replace(" ", "_")
        return jax.jit(named, out_shardings=out, donate_argnums=() if donate is None else donate)

    def _spec(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.place.whole)

    def _rows(self, batch: int, width: int) -> jax.ShapeDtypeStruct:
        """Packed rows of a model's step."""
        words = HEADER + width + self._programs.geometry.table_width
        sharding = self.place.rows(self._programs.shape, batch)
        return jax.ShapeDtypeStruct((batch, words), jnp.int32, sharding=sharding)

    def _pages(self, count: int) -> jax.ShapeDtypeStruct:
        programs = self._programs
        return jax.ShapeDtypeStruct(programs.pages_shape(count), programs.page_dtype, sharding=self._paged)

    def _model(self, name: str, batch: int, width: int) -> Any:
        geometry = self._programs.geometry
        rows = self._rows(batch, width)
        out = (self.place.whole, self._paged)
        attend = self._kernels.decode if width == 1 else self._kernels.prefill
        function = self._jit(name, partial(self._programs.logits, width, attend), out, donate=1)
        return function.lower(self.weights, self._pages(geometry.pages + 1), rows)

    def _fused(self, name: str, batch: int) -> Any:
        programs, geometry = self._programs, self._programs.geometry

        def steps(weights: list[Array], pages: Array, rows: Array, words: Array, temperatures: Array) -> Any:
            def one(state: tuple[Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array], Array]:
                pages, rows, words = state
                logits, pages = programs.logits(1, self._kernels.decode, weights, pages, rows)
                picked = sample(logits, words, temperatures)
                # One position further, feeding what came out; rows of padding, whose length is 0, stay where they are.
                rows = rows.at[:, 1].add(rows[:, 0]).at[:, HEADER].set(picked[:, 0])
                return (pages, rows, words.at[:, 2].add(1)), picked

            (pages, _, _), picked = jax.lax.scan(one, (pages, rows, words), length=geometry.fused_steps)
            return picked, pages

        rows = self._rows(batch, 1)
        words, temperatures = self._spec((batch, 3), jnp.int32), self._spec((batch,), jnp.float32)
        function = self._jit(name, steps, (self.place.whole, self._paged), donate=1)
        return function.lower(self.weights, self._pages(geometry.pages + 1), rows, words, temperatures)

    def _sampler(self, name: str, batch: int) -> Any:
        logits = self._spec((batch, self._programs.shape.vocab), jnp.float32)
        words, temperatures = self._spec((batch, 3), jnp.int32), self._spec((batch,), jnp.float32)
        return self._jit(name, sample, self.place.whole).lower(logits, words, temperatures)

    def _full_sampler(self, name: str, batch: int) -> Any:
        logits = self._spec((batch, self._programs.shape.vocab), jnp.float32)
        words = self._spec((batch, FULL_WORDS + self._programs.geometry.max_context_tokens), jnp.int32)
        numbers = self._spec((batch, FULL_NUMBERS), jnp.float32)
        return self._jit(name, sample_fully, self.place.whole).lower(logits, words, numbers)

    def _move(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        programs, wide = self._programs, self._programs.geometry.move_pages
        blocks = jax.ShapeDtypeStruct((wide, *programs.block_shape), programs.block_dtype, sharding=self._blocks)
        return self._pages(programs.geometry.pages + 1), self._spec((wide,), jnp.int32), blocks


def _bits(array: Array, dtype: np.dtype[Any]) -> Array:
    """The same bits as another type of the same width."""
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)
