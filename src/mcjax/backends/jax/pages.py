"""The bytes of an instance's pages, on its device. Touched by the executor's thread only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Array
from numpy.typing import NDArray

from mcjax.backends.jax.placement import Device, Place
from mcjax.backends.jax.programs import Programs
from mcjax.errors import ConfigError


class Pages:
    """Made at first use, all NaN. Programs that change pages consume them: see `consumed`."""

    def __init__(self, programs: Programs, device: Device | Place):
        self.losses = 0
        """How often what the pages held was lost. Other threads may read it."""
        self._programs = programs
        self._device = device
        self._array: jax.Array | None = None

    @contextlib.contextmanager
    def consumed(self) -> Iterator[jax.Array]:
        """The pages, for a program that consumes them and returns new ones, which go to `replace`.

        Whatever is raised inside, there are pages afterwards: the same, or new ones and one more loss.
        """
        array = self.held()
        try:
            yield array
        except Exception:
            self._look_after_failure()
            raise

    def replace(self, pages: jax.Array) -> None:
        """What a program made of the pages that it consumed."""
        self._array = pages

    def held(self) -> jax.Array:
        """The pages. Raises `ConfigError` if the device has no room for them."""
        if self._array is not None:
            return self._array
        geometry, page_bytes = self._programs.geometry, self._programs.page_bytes
        try:
            made = jax.block_until_ready(self._programs.new_pages(self._device))
        except Exception as problem:
            size = f"{(geometry.pages + 1) * page_bytes / 2**30:.1f} GiB do not fit {self._device}"
            raise ConfigError("backend.pages", geometry.pages, f"{size} ({one_line(problem)})") from None
        self._array = made
        return made

    def read(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """`[n, page_bytes]`: a copy of the bytes of these pages, as canonical blocks."""
        gather = self._programs.on(self._device).gather
        blocks = np.empty((len(slots), self._programs.page_bytes), dtype=np.uint8)
        for first, part in self._parts(slots):
            gathered = np.asarray(gather(self.held(), self._padded(part)))
            blocks[first : first + len(part)] = gathered[: len(part)].reshape(len(part), -1).view(np.uint8)
        return blocks

    def write(self, slots: Sequence[int], blocks: NDArray[np.uint8]) -> None:
        """Overwrite these pages with `blocks` (`[n, page_bytes]`). Returns when the bytes are on the device."""
        programs, scatter = self._programs, self._programs.on(self._device).scatter
        wide = programs.geometry.move_pages
        for first, part in self._parts(slots):
            staged = np.zeros((wide, *programs.block_shape), dtype=programs.block_dtype)
            staged.reshape(wide, -1).view(np.uint8)[: len(part)] = blocks[first : first + len(part)]
            with self.consumed() as pages:
                # The device may read the staged buffer in place: nothing may be reused before it is done.
                self.replace(scatter(pages, self._padded(part), staged))
                jax.block_until_ready(self._array)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy page to page, without the host. No page may be both. Returns when it is done."""
        duplicate = self._programs.on(self._device).duplicate
        for first, part in self._parts(sources):
            there = targets[first : first + len(part)]
            with self.consumed() as pages:
                self.replace(duplicate(pages, self._padded(part), self._padded(there)))
                jax.block_until_ready(self._array)

    def gather(self, slots: Sequence[int]) -> Iterator[tuple[int, Array]]:
        """Copies of these pages, on the device, part by part: how many pages, and `[W, L, 2, page, Hkv, D]` that begin
        with them.

        New arrays, which nothing done to the pages later changes.
        """
        gather = self._programs.on(self._device).gather
        for _, part in self._parts(slots):
            yield len(part), gather(self.held(), self._padded(part))

    def scatter(self, slots: Sequence[int], blocks: Array) -> None:
        """Overwrite up to `W` pages with the first of `blocks` (`[W, L, 2, page, Hkv, D]`, spread as `gather`'s
        are). Returns when it is done."""
        with self.consumed() as pages:
            self.replace(self._programs.on(self._device).scatter(pages, self._padded(slots), blocks))
            jax.block_until_ready(self._array)

    def poison(self, slots: Sequence[int]) -> None:
        """Overwrite these pages with NaN."""
        programs = self._programs
        nan = np.full((len(slots), *programs.block_shape), programs.unwritten, dtype=programs.block_dtype)
        self.write(slots, nan.reshape(len(slots), -1).view(np.uint8))

    def drop(self) -> None:
        """Give the memory back."""
        self._array = None

    def _parts(self, slots: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        wide = self._programs.geometry.move_pages
        for first in range(0, len(slots), wide):
            yield first, slots[first : first + wide]

    def _padded(self, slots: Sequence[int]) -> NDArray[np.int32]:
        geometry = self._programs.geometry
        padded = np.full(geometry.move_pages, geometry.pages, dtype=np.int32)
        padded[: len(slots)] = slots
        return padded

    def _look_after_failure(self) -> None:
        try:
            sound = self._array is not None and not self._array.is_deleted()
            # A program that fails after it was handed over hands its failure on to what it would have returned.
            jax.block_until_ready(self._array if sound else None)
        except Exception:
            sound = False
        if not sound:
            self._array = None
            self.losses += 1


def one_line(problem: BaseException) -> str:
    """`Type: what it says`, of the first line that says something."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[0]}" if lines else type(problem).__name__
