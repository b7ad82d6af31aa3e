"""What is said of device memory is what the executables say, and pages are as many as fit."""

from __future__ import annotations

from typing import Any

import pytest
from test_compilation import SHAPE, SIZES

from mcjax.backends.jax.memory import Room, choose_pages
from mcjax.backends.jax.world import JaxWorld
from mcjax.errors import ConfigError
from mcjax.types import Role

BOTH = [("p0", Role.PREFILL), ("d0", Role.DECODE)]


def prepared(**options: Any) -> JaxWorld:
    world = JaxWorld(SHAPE, **{**SIZES, **options})

    async def main() -> None:
        await world.prepare(BOTH, lambda what, share: None)
        await world.close()

    world.run(main)
    return world


@pytest.mark.parametrize("mesh", [1, 2])
def test_weights_and_pages_are_what_the_executables_take(mesh: int) -> None:
    world = prepared(mesh=mesh)
    for name, shape, width in (("p0", "model 1x16", 16), ("d0", "model 2x1", 1)):
        memory = world.memory(name)
        rows_bytes = 4 * int(shape[6]) * (2 + width + 16)
        program = world._model_programs().on(world._places[name]).compiled[shape]
        taken = program.memory_analysis()
        assert taken.argument_size_in_bytes == memory.weights_bytes + memory.pages_bytes + rows_bytes
        assert memory.workspace_bytes >= taken.temp_size_in_bytes > 0
        assert len(memory.devices) == mesh


def test_a_mesh_divides_what_can_be_divided() -> None:
    """The one key head of this model lies on both devices: so do pages, and what makes queries, keys and values."""
    alone, two = prepared(mesh=1).memory("p0"), prepared(mesh=2).memory("p0")
    assert two.pages_bytes == alone.pages_bytes
    whole = 4 * (259 * 16 + 3 * 16 + 4 * 16 * 8 + 128 * 2 * 4)  # embedding, gains, queries with keys, rotary
    assert two.weights_bytes - whole == (alone.weights_bytes - whole) / 2


def test_as_many_pages_as_fit() -> None:
    alone = prepared().memory("p0")
    page = alone.pages_bytes // 21
    both = prepared(pages=None, memory_bytes=1_000_000, memory_share=0.5)
    memory = [both.memory(name) for name, _ in BOTH]
    assert [sum([m.weights_bytes, m.pages_bytes, m.workspace_bytes]) <= 500_000 for m in memory] == [True, True]
    least = min(500_000 - m.weights_bytes - m.pages_bytes - m.workspace_bytes for m in memory)
    assert least < page
    pages = both.instance("p0", "n0", Role.PREFILL).executor.capacity().pages
    assert pages == memory[0].pages_bytes // page - 1


def test_more_pages_than_fit_are_refused_with_how_many_do() -> None:
    with pytest.raises(ConfigError, match=r"backend\.pages=2000: .* room for \d+ pages"):
        prepared(pages=2000, memory_bytes=300_000)
    with pytest.raises(ConfigError, match=r"backend\.pages=null: .* one context takes 16: lower"):
        prepared(pages=None, memory_bytes=30_000)


def test_one_device_is_split_between_its_instances() -> None:
    room = Room(limit_bytes=10_000, weights_bytes=1_000, workspaces_bytes=(500, 500), page_bytes=100)
    assert room.pages(1.0) == (10_000 - 1_000 - 1_000) // 200 - 1
    assert room.pages(0.1) == 0
    assert choose_pages(None, 4, [room], 0.9) == room.pages(0.9)
    assert choose_pages(room.pages(1.0), 4, [room], 0.9) == room.pages(1.0)
    assert choose_pages(None, 4, [room, Room(5_000, 0, (0, 0), 100)], 1.0) == 24


def test_without_a_limit_the_default_stands() -> None:
    assert choose_pages(None, 4, [], 0.9) == 512
    assert choose_pages(None, 600, [], 0.9) == 600
    assert choose_pages(7, 4, [], 0.9) == 7


def test_pages_are_counted_on_each_device(lab: Any) -> None:
    import jax

    from mcjax.backends.jax.placement import Place

    devices = jax.local_devices()
    sizes = [lab.programs.on(Place(tuple(devices[:count]))).page_bytes for count in (1, 2, 4)]
    # Two key heads: of four devices, each two share one.
    assert sizes == [lab.programs.page_bytes, lab.programs.page_bytes // 2, lab.programs.page_bytes // 2]
