"""The few compiled programs that an executor runs. Each has one shape, so each row's bits depend on that row alone.

model: a batch of rows of one width, to logits (a chunk of a prompt is one row, a decode step one token a row). sampler:
logits to tokens, plainly or with all that a request may ask for. gather, scatter, duplicate: a fixed number of whole
pages, for transfers. Compiled ahead of time, once a device; any other shape is refused, not recompiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from mcjax.backends.jax.sampling import FULL_NUMBERS, FULL_WORDS, sample, sample_fully
from mcjax.errors import ConfigError
from mcjax.kernels.attention.dispatch import paged_attention
from mcjax.models.llama import Llama, LlamaConfig

Device: TypeAlias = Any
"""A `jax.Device`, which type checkers take for a variable."""

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

    def __post_init__(self) -> None:
        for name in ("pages", "page_tokens", "max_batch", "chunk_tokens", "max_context_tokens", "move_pages"):
            if getattr(self, name) < 1:
                raise ConfigError(f"backend.{name}", getattr(self, name), "must be at least 1")

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
    """A model's step and page functions for one geometry; `on(device)` compiles them. Shared by all executors."""

    def __init__(self, model: Llama, geometry: Geometry, attention: str = "blockwise"):
        self.config: LlamaConfig = model.config
        self.geometry = geometry
        self.page_shape = model.config.page_shape(geometry.page_tokens)
        self.dtype: np.dtype[Any] = jnp.dtype(model.config.dtype)
        self.page_bytes = int(np.prod(self.page_shape)) * self.dtype.itemsize
        self._graph, state = nnx.split(model)
        self.leaves, self._tree = jax.tree.flatten(state)
        self._attend = paged_attention(attention)
        self._lock = threading.Lock()
        self._devices: dict[Device, DevicePrograms] = {}

    def new_pages(self, device: Device) -> Float[Array, "P+1 L 2 page Hkv D"]:
        """Pages and the scratch page, all NaN: whoever reads what nobody wrote shows it."""
        shape = (self.geometry.pages + 1, *self.page_shape)
        return jnp.full(shape, jnp.nan, dtype=self.dtype, device=device)

    def on(self, device: Device) -> DevicePrograms:
        """The programs of `device`. Thread-safe."""
        with self._lock:
            if device not in self._devices:
                self._devices[device] = DevicePrograms(self, device)
            return self._devices[device]

    def logits(
        self,
        width: int,
        weights: list[Array],
        pages: Float[Array, "P+1 L 2 page Hkv D"],
        rows: Int[Array, "B R"],
    ) -> tuple[Float[Array, "B V"], Float[Array, "P+1 L 2 page Hkv D"]]:
        """The model's step for packed rows (`pack_row`)."""
        model = nnx.merge(self._graph, jax.tree.unflatten(self._tree, weights))
        lengths, starts = rows[:, 0], rows[:, 1]
        tokens, table = rows[:, HEADER : HEADER + width], rows[:, HEADER + width :]
        step = jnp.arange(width, dtype=jnp.int32)[None, :]
        positions = jnp.where(step < lengths[:, None], starts[:, None] + step, -1)
        return model(tokens, positions, pages, table, lengths, self._attend)


class DevicePrograms:
    """The programs and weights of one device. Each is compiled at first use (seconds), ahead of its first call.

    A program that returns pages consumes those it was given.
    """

    def __init__(self, programs: Programs, device: Device):
        self.device = device
        self.weights = [jax.device_put(leaf, device) for leaf in programs.leaves]
        self._programs = programs
        self._place = jax.sharding.SingleDeviceSharding(device)
        self._lock = threading.Lock()
        self._compiled: dict[str, Callable[..., Any]] = {}

    @property
    def count(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    def model(self, batch: int, width: int) -> Callable[..., tuple[Array, Array]]:
        """`(weights, pages, rows [batch, HEADER + width + N]) -> (logits [batch, V], pages)`"""
        return self._get(f"model {batch}x{width}", lambda: self._model(batch, width))

    def sampler(self, batch: int) -> Callable[..., Array]:
        """`(logits [batch, V], words [batch, 3], temperatures [batch]) -> [batch, 2]`, see `sampling.sample`"""
        return self._get(f"sampler {batch}", lambda: self._sampler(batch))

    def full_sampler(self, batch: int) -> Callable[..., Array]:
        """`(logits [batch, V], words [batch, FULL_WORDS + max_context_tokens], numbers [batch, 6]) -> [batch, 3 + 2K]`,
        see `sampling.sample_fully`"""
        return self._get(f"full sampler {batch}", lambda: self._full_sampler(batch))

    @property
    def gather(self) -> Callable[..., Array]:
        """`(pages, slots [W]) -> [W, L, 2, page, Hkv, D]`"""
        return self._get("gather", lambda: jax.jit(lambda pages, slots: pages[slots]).lower(*self._move()[:2]))

    @property
    def scatter(self) -> Callable[..., Array]:
        """`(pages, slots [W], blocks [W, L, 2, page, Hkv, D]) -> pages`"""

        def put(pages: Array, slots: Array, blocks: Array) -> Array:
            return pages.at[slots].set(blocks)

        return self._get("scatter", lambda: jax.jit(put, donate_argnums=0).lower(*self._move()))

    @property
    def duplicate(self) -> Callable[..., Array]:
        """`(pages, sources [W], targets [W]) -> pages`"""

        def put(pages: Array, sources: Array, targets: Array) -> Array:
            return pages.at[targets].set(pages[sources])

        pages, slots, _ = self._move()
        return self._get("duplicate", lambda: jax.jit(put, donate_argnums=0).lower(pages, slots, slots))

    def _get(self, name: str, lower: Callable[[], Any]) -> Any:
        found = self._compiled.get(name)
        if found is None:
            with self._lock:
                if name not in self._compiled:
                    self._compiled[name] = lower().compile()
                found = self._compiled[name]
        return found

    def _spec(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._place)

    def _pages(self, count: int) -> jax.ShapeDtypeStruct:
        return self._spec((count, *self._programs.page_shape), self._programs.dtype)

    def _model(self, batch: int, width: int) -> Any:
        geometry = self._programs.geometry
        rows = self._spec((batch, HEADER + width + geometry.table_width), jnp.int32)
        function = jax.jit(partial(self._programs.logits, width), donate_argnums=1)
        return function.lower(self.weights, self._pages(geometry.pages + 1), rows)

    def _sampler(self, batch: int) -> Any:
        logits = self._spec((batch, self._programs.config.vocab), jnp.float32)
        words, temperatures = self._spec((batch, 3), jnp.int32), self._spec((batch,), jnp.float32)
        return jax.jit(sample).lower(logits, words, temperatures)

    def _full_sampler(self, batch: int) -> Any:
        logits = self._spec((batch, self._programs.config.vocab), jnp.float32)
        words = self._spec((batch, FULL_WORDS + self._programs.geometry.max_context_tokens), jnp.int32)
        return jax.jit(sample_fully).lower(logits, words, self._spec((batch, FULL_NUMBERS), jnp.float32))

    def _move(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        geometry = self._programs.geometry
        slots = self._spec((geometry.move_pages,), jnp.int32)
        return self._pages(geometry.pages + 1), slots, self._pages(geometry.move_pages)
