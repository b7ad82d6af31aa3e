"""The few compiled programs that an executor runs. Each has one shape, so each row's bits depend on that row alone.

prefill: one sequence, a chunk of fixed width. decode: a fixed batch, one token each. gather, scatter: a fixed number of
whole pages, for transfers. Compiled ahead of time, once a device; any other shape is refused, not recompiled.
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

from mcjax.backends.jax.sampling import sample
from mcjax.errors import ConfigError
from mcjax.kernels.attention.dispatch import paged_attention
from mcjax.models.llama import Llama, LlamaConfig

Device: TypeAlias = Any
"""A `jax.Device`, which type checkers take for a variable."""

HEADER = 4
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
    width: int, length: int, start: int, seed: int, tokens: NDArray[np.int32], pages: list[int], geometry: Geometry
) -> NDArray[np.int32]:
    """`[HEADER + width + N]` int32: length, start, seed (high, low word), `width` tokens, page table.

    One array a call, since each array handed to a device costs more than its bytes. Unused table entries name the
    scratch page.
    """
    row = np.zeros(HEADER + width + geometry.table_width, dtype=np.int32)
    row[0], row[1] = length, start
    row[2:4] = np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], dtype=np.uint32).view(np.int32)
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

    def step(
        self,
        width: int,
        weights: list[Array],
        pages: Float[Array, "P+1 L 2 page Hkv D"],
        rows: Int[Array, "B R"],
        temperatures: Float[Array, " B"],
    ) -> tuple[Int[Array, " B"], Float[Array, "P+1 L 2 page Hkv D"]]:
        model = nnx.merge(self._graph, jax.tree.unflatten(self._tree, weights))
        lengths, starts = rows[:, 0], rows[:, 1]
        seeds = jax.lax.bitcast_convert_type(rows[:, 2:4], jnp.uint32)
        tokens, table = rows[:, HEADER : HEADER + width], rows[:, HEADER + width :]
        step = jnp.arange(width, dtype=jnp.int32)[None, :]
        positions = jnp.where(step < lengths[:, None], starts[:, None] + step, -1)
        logits, pages = model(tokens, positions, pages, table, lengths, self._attend)
        return sample(logits, temperatures, seeds, starts + lengths), pages


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
        """Programs compiled so far, of four."""
        return len(self._compiled)

    @property
    def prefill(self) -> Callable[..., tuple[Array, Array]]:
        """`(weights, pages, rows [1, HEADER + C + N], temperatures [1]) -> (tokens [1], pages)`"""
        return self._get("prefill", lambda: self._step(1, self._programs.geometry.chunk_tokens))

    @property
    def decode(self) -> Callable[..., tuple[Array, Array]]:
        """`(weights, pages, rows [B, HEADER + 1 + N], temperatures [B]) -> (tokens [B], pages)`"""
        return self._get("decode", lambda: self._step(self._programs.geometry.max_batch, 1))

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

    def _step(self, batch: int, width: int) -> Any:
        geometry = self._programs.geometry
        rows = self._spec((batch, HEADER + width + geometry.table_width), jnp.int32)
        function = jax.jit(partial(self._programs.step, width), donate_argnums=1)
        return function.lower(self.weights, self._pages(geometry.pages + 1), rows, self._spec((batch,), jnp.float32))

    def _move(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        geometry = self._programs.geometry
        slots = self._spec((geometry.move_pages,), jnp.int32)
        return self._pages(geometry.pages + 1), slots, self._pages(geometry.move_pages)
