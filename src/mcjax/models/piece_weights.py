"""From pieces on the host to parameters on devices, shard by shard."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from numpy.typing import NDArray

from mcjax.cost.parameters import Parameter
from mcjax.errors import ConfigError
from mcjax.models.pieces import Piece, Window, extent, parted, pieces, whole, windows

CHUNK_BYTES = 16 << 20
"""Copied at a time: what was read of a mapped file need not stay in memory for longer."""
CACHE_LINE_BYTES = 64
STRIP = 16
"""Rows of a matrix that are transposed together."""


class PieceWeights(ABC):
    """Implements `PlacedSource` for whoever can read pieces. Each shard is put together in the host's memory, once.

    On a CPU that memory is the device's: nothing is copied again.
    """

    in_windows = True
    """Whether `read` is cheap for a part of a piece; else a parameter is put together whole before it is cut."""

    def __init__(self, dtype: str):
        self._dtype = jnp.dtype(dtype)

    @abstractmethod
    def read(self, piece: Piece, window: Window) -> Iterable[NDArray[Any]]:
        """Stretches that give the window, one behind the other along its first dimension. Views are best."""

    @abstractmethod
    def origin(self, piece: Piece) -> tuple[str, object, str]:
        """What an error about the piece names: a config key, its value, and how the piece is called there."""

    def let_go(self) -> None:  # noqa: B027  # most have nothing to do
        """What `read` gave so far was copied."""

    def __call__(self, name: str, parameter: Parameter, sharding: Sharding | None = None) -> jax.Array:
        """The parameter `name`. Raises `ConfigError` for numbers that are not finite in the dtype asked for."""
        if sharding is None:
            default = jax.config.values["jax_default_device"] or jax.local_devices()[0]
            sharding = SingleDeviceSharding(default)
        places: dict[tuple[tuple[int, int], ...], list[Any]] = {}
        for device, index in sharding.addressable_devices_indices_map(parameter.shape).items():
            bounds = [part.indices(size)[:2] for part, size in zip(index or (), parameter.shape, strict=True)]
            places.setdefault(tuple(bounds), []).append(device)
        arrays: list[jax.Array] = []
        for bounds, host in self._shards(name, parameter, list(places)):
            # Wait, so that there is never more than one shard on its way.
            arrays += [jax.device_put(host, device).block_until_ready() for device in places[bounds]]
        return jax.make_array_from_single_device_arrays(parameter.shape, sharding, arrays)

    def _shards(
        self, name: str, parameter: Parameter, places: Sequence[tuple[tuple[int, int], ...]]
    ) -> Iterator[tuple[tuple[tuple[int, int], ...], NDArray[Any]]]:
        if self.in_windows or len(places) == 1:
            for bounds in places:
                yield bounds, self.part(name, parameter, tuple(slice(*pair) for pair in bounds))
            return
        everything = self.part(name, parameter, whole(parameter.shape))
        for bounds in places:
            window = tuple(slice(*pair) for pair in bounds)
            shard = aligned(extent(window), self._dtype)
            _copy(shard, everything[window])
            yield bounds, shard

    def part(self, name: str, parameter: Parameter, window: Window) -> NDArray[Any]:
        """A window of the parameter, in the host's memory. Raises as a call does."""
        host = aligned(extent(window), self._dtype)
        parts = zip(pieces(name, parameter), windows(name, parameter, window), parted(name, host), strict=True)
        for piece, inside, target in parts:
            size, row = extent(inside), 0
            for stretch in self.read(piece, inside):
                if stretch.shape == size:
                    part, row = target, size[0]
                else:
                    part = target[row : row + len(stretch)]
                    row += len(stretch)
                for ours, theirs in _chunks(part, stretch.reshape(part.shape)):
                    _copy(ours, theirs)
                    self.let_go()
            assert row == size[0], (piece, row)
        if not _finite(host):
            self._name_the_broken(name, parameter, host)
        return host

    def _name_the_broken(self, name: str, parameter: Parameter, host: NDArray[Any]) -> None:
        for piece, target in zip(pieces(name, parameter), parted(name, host), strict=True):
            bad = np.argwhere(~np.isfinite(target.astype(np.float32)))
            if len(bad):
                key, value, called = self.origin(piece)
                problem = (
                    f"{called} holds {len(bad)} numbers that are NaN or infinite in {self._dtype} ({piece.name}): "
                    "the file is damaged, or was written by a training run that broke"
                )
                raise ConfigError(key, value, problem)


def aligned(shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array without content that begins on a cache line, which lets XLA:CPU take it as it is."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + CACHE_LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE_BYTES
    return memory[start : start + size].view(dtype).reshape(shape)


def _chunks(target: NDArray[Any], source: NDArray[Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Both in parts of bounded size, in the order in which the source lies in memory."""
    count = -(-source.nbytes // CHUNK_BYTES)
    if count <= 1:
        yield target, source
        return
    axis = max(range(source.ndim), key=lambda axis: (abs(source.strides[axis]), source.shape[axis]))
    step = -(-source.shape[axis] // count)
    for start in range(0, source.shape[axis], step):
        part = (slice(None),) * axis + (slice(start, start + step),)
        yield target[part], source[part]


def _copy(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Of equal dtypes the bits, without a detour through another."""
    if target.dtype == source.dtype:
        bits = np.dtype(f"u{target.itemsize}")
        target, source = target.view(bits), source.view(bits)
    with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is looked at later
        for ours, theirs in _strips(target, source):
            np.copyto(ours, theirs, casting="unsafe")


def _strips(target: NDArray[Any], source: NDArray[Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Both in strips that a cache holds, where one is the other transposed: that is six times as fast in bfloat16."""
    axes = [axis for axis in range(target.ndim) if target.shape[axis] > 1]
    axis = min(axes, key=lambda axis: target.strides[axis], default=0)
    if not axes or abs(source.strides[axis]) < CACHE_LINE_BYTES:
        yield target, source
        return
    for start in range(0, target.shape[axis], STRIP):
        part = (slice(None),) * axis + (slice(start, start + STRIP),)
        yield target[part], source[part]


def _finite(host: NDArray[Any]) -> bool:
    """Whether no exponent is all ones: on bits, since NumPy knows no fast way for bfloat16."""
    bits = np.dtype(f"u{host.itemsize}")
    flat = host.reshape(-1).view(bits)
    infinity = np.array(np.inf, host.dtype).view(bits)
    magnitude, step = bits.type((1 << (8 * host.itemsize - 1)) - 1), 1 << 18
    room = np.empty(min(step, flat.size), bits)
    for start in range(0, flat.size, step):
        part = flat[start : start + step]
        if np.bitwise_and(part, magnitude, out=room[: part.size]).max() >= infinity:
            return False
    return True
