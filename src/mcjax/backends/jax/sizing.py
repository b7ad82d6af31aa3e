"""From a config to the shapes that are compiled, and to the pages that fit beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from mcjax.backends.jax.buckets import tune
from mcjax.backends.jax.compilation import AUTO
from mcjax.backends.jax.memory import Room, array_bytes, choose_pages, workspace_bytes
from mcjax.backends.jax.placement import Device, Place
from mcjax.backends.jax.programs import Geometry, Programs
from mcjax.errors import ConfigError
from mcjax.types import Role

PREFILL_WIDTHS = 4
"""How many widths `auto` chooses, at most: each is a program to compile."""
WIDTH_MULTIPLE = 8
"""Of the widths that `auto` chooses: vector units like round numbers."""


def buckets_of(
    key: str, wanted: Sequence[int] | str, fast: bool, chosen: Callable[[], tuple[int, ...]]
) -> tuple[int, ...]:
    """What a config says of the shapes of a phase; () for the one shape of `numerics=invariant`."""
    if wanted == AUTO:
        return chosen() if fast else ()
    if isinstance(wanted, str):
        raise ConfigError(f"backend.{key}", wanted, "must be a list of whole numbers, or auto")
    if not fast:
        raise ConfigError(f"backend.{key}", list(wanted), "numerics=invariant has one shape", [AUTO])
    return tuple(wanted)


def widths_for(sample: Sequence[int], chunk_tokens: int) -> tuple[int, ...]:
    """Widths for a sample of chunks; without one, as for chunks of any length."""
    return tune(sample or range(1, chunk_tokens + 1), chunk_tokens, PREFILL_WIDTHS, WIDTH_MULTIPLE)


def pages_that_fit(
    programs_of: Callable[[Geometry], Programs],
    geometry: Geometry,
    wanted: int | None,
    instances: Sequence[tuple[Place, Role]],
    limit_bytes: Callable[[Device], int | None],
    share: float,
) -> int:
    """How many pages each of these instances gets: see `memory.choose_pages`.

    Where a device says what it holds, the model's programs are compiled to find out what they work in. That does not
    grow with the number of pages: programs for few of them show it.
    """
    limits = {device: limit_bytes(device) for place, _ in instances for device in place.devices}
    rooms: list[Room] = []
    if any(limits.values()):
        probe = programs_of(dataclasses.replace(geometry, pages=geometry.table_width))
        for device, limit in limits.items():
            if limit:
                rooms.append(_room(probe, [on for on in instances if device in on[0].devices], limit))
    return choose_pages(wanted, geometry.table_width, rooms, share)


def _room(programs: Programs, here: Sequence[tuple[Place, Role]], limit_bytes: int) -> Room:
    """What instances of these places and roles leave on a device that all of them use."""
    geometry = programs.geometry
    workspaces: list[int] = []
    for place, role in here:
        on = programs.on(place)
        shapes = [(1, width) for width in geometry.widths if role is not Role.DECODE]
        shapes += [(batch, 1) for batch in geometry.batches if role is not Role.PREFILL]
        for batch, width in shapes:
            on.model(batch, width)
        workspaces.append(workspace_bytes(on.compiled))
    places = dict.fromkeys(place for place, _ in here)
    weights = sum(array_bytes(programs.on(place).weights) for place in places)
    page = max(programs.on(place).page_bytes for place in places)
    return Room(limit_bytes, weights, tuple(workspaces), page)


def device_name(device: Any) -> str:
    """As logs and summaries say it."""
    return f"{device.platform}:{device.id}"
