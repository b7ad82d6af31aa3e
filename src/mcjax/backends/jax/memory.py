"""What an instance takes of its devices' memory: weights, pages, and the workspace of its programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcjax.errors import ConfigError

DEFAULT_PAGES = 512
"""Where no limit of the memory is known."""

NEW_PAGES = "new pages"
"""The name of the program that makes an instance's pages."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on each of an instance's devices."""

    devices: tuple[str, ...]
    weights_bytes: int
    """Shared with every other instance on the same devices."""
    pages_bytes: int
    """The scratch page counts."""
    workspace_bytes: int
    """Of the hungriest program: what it computes in, and what it returns in memory of its own."""


@dataclass(frozen=True, slots=True)
class Room:
    """One device, and what must lie there beside pages."""

    limit_bytes: int
    weights_bytes: int
    workspaces_bytes: tuple[int, ...]
    """Of each instance there: their programs run side by side."""
    page_bytes: int
    """Of one page, as far as it lies on this device."""

    def pages(self, share: float) -> int:
        """Pages that each instance may have, if they take up to `share` of the memory; the scratch page not counted."""
        left = int(self.limit_bytes * share) - self.weights_bytes - sum(self.workspaces_bytes)
        return max(0, left // (len(self.workspaces_bytes) * self.page_bytes) - 1)


def workspace_bytes(programs: Mapping[str, Any]) -> int:
    """The most that one of these programs (`jax.stages.Compiled`) takes beside its arguments, on each device."""
    most = 0
    for name, program in programs.items():
        if name == NEW_PAGES:  # what it makes are the pages
            continue
        found = program.memory_analysis()
        if found is not None:
            own = found.output_size_in_bytes - found.alias_size_in_bytes  # pages come back in the place they had
            most = max(most, found.temp_size_in_bytes + own + found.generated_code_size_in_bytes)
    return most


def array_bytes(arrays: Iterable[Any]) -> int:
    """Bytes of some `jax.Array`s on each of their devices."""
    total = 0
    for array in arrays:
        shape = array.sharding.shard_shape(array.shape)
        count = 1
        for size in shape:
            count *= size
        total += count * array.dtype.itemsize
    return total


def choose_pages(wanted: int | None, least: int, rooms: Sequence[Room], share: float) -> int:
    """Pages of each instance: `wanted`, or as many as every device has room for. At least `least` of them.

    Raises `ConfigError`, which says how many there is room for, when that is too few.
    """
    if not rooms:
        return max(DEFAULT_PAGES, least) if wanted is None else wanted
    # What a user asks for may take all there is; what we choose leaves the rest to others.
    fit = min(room.pages(1.0 if wanted is not None else share) for room in rooms)
    needed = least if wanted is None else wanted
    if fit < needed:
        room = rooms[0]
        problem = (
            f"the device's memory of {room.limit_bytes:,} B has room for {fit} pages for each of its "
            f"{len(room.workspaces_bytes)} instances, beside {room.weights_bytes:,} B of weights and "
            f"{sum(room.workspaces_bytes):,} B of workspace"
        )
        if fit < least:
            problem += f"; one context takes {least}: lower backend.max_context_tokens"
        raise ConfigError("backend.pages", "null" if wanted is None else wanted, problem)
    return fit if wanted is None else wanted
