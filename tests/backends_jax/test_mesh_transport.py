"""Pages of one instance to another's, mesh to mesh: every byte, real copies, refusals, and no two threads that wait
for each other."""

from __future__ import annotations

import asyncio
import threading

import jax
import numpy as np
import pytest
import xxhash

from mcjax.backends.jax.device_store import DevicePages
from mcjax.backends.jax.mesh_transport import LEG_PARTS, Mesh
from mcjax.backends.jax.placement import Place
from mcjax.backends.jax.programs import Geometry, Programs
from mcjax.errors import LayoutMismatch, StaleRegion, TransferError
from mcjax.kvpool.stores.host import HostStore
from mcjax.transfer.base import Copy, Region
from mcjax.transfer.engine import TransferEngine
from mcjax.types import NullRecorder


def place(*numbers: int) -> Place:
    return Place(tuple(jax.local_devices()[number] for number in numbers))


def shown(lab, transport, name, where, node="n0", **options) -> DevicePages:
    pages = DevicePages(node, lab.executor(name, where, **options), poison=True)
    transport.register(pages)
    return pages


async def done(transport, *copies):
    return await asyncio.wait_for(transport.submit(list(copies)).future, 30)


async def bytes_of(pages, slots) -> np.ndarray:
    return await pages.executor.on_thread(lambda: pages.executor.read_pages(slots))


async def filled(lab, pages, count, seed=0) -> tuple[list[int], np.ndarray]:
    """Slots that hold bytes of their own: where, and which."""
    slots = pages.reserve(count)
    numbers = np.random.default_rng(seed).standard_normal((count, lab.programs.page_bytes // 4)).astype(np.float32)
    blocks = numbers.view(np.uint8)
    await pages.executor.on_thread(lambda: pages.executor.write_pages(slots, blocks))
    return slots, blocks


@pytest.mark.parametrize(
    ("source", "target"), [((0,), (1,)), ((0,), (2, 3)), ((0, 1), (2,)), ((0, 1), (2, 3)), ((0,), (0,))]
)
def test_pages_cross_between_meshes_and_are_copies(lab, source, target):
    async def main():
        transport = Mesh()
        one = shown(lab, transport, "one", place(*source))
        two = shown(lab, transport, "two", place(*target), node="n1")
        home, blocks = await filled(lab, one, 13)
        two.reserve(5)
        away = two.reserve(13)
        (result,) = await done(transport, Copy(one.regions(home), two.regions(away[::-1]), checksum=True))
        one.free(home)  # poisons: if what arrived were an alias of these pages, it would be NaN now
        gone = await bytes_of(one, home)
        return blocks, await bytes_of(two, away[::-1]), gone, result, transport.stats()

    blocks, arrived, gone, result, stats = lab.run(main)
    assert result.error is None
    np.testing.assert_array_equal(arrived, blocks)
    assert np.isnan(gone.view(np.float32)).all()
    assert result.checksums == tuple(xxhash.xxh3_128(block.tobytes()).digest() for block in blocks)
    assert (stats.bytes_moved, stats.copies, stats.pending_bytes) == (13 * lab.programs.page_bytes, 1, 0)


def test_decoding_goes_on_bit_for_bit_on_another_mesh(lab):
    prompt = lab.prompt(1, 100)

    async def main():
        transport = Mesh()
        one = shown(lab, transport, "one", place(0))
        two = shown(lab, transport, "two", place(1))
        home = one.reserve(20)
        token = await lab.prefill(one.executor, prompt, home)
        away = two.reserve(20)
        await done(transport, Copy(one.regions(home[:13]), two.regions(away[:13])))
        reference = [token, *await lab.decode(one.executor, token, 100, home, 40)]
        one.free(home)
        return reference, [token, *await lab.decode(two.executor, token, 100, away, 40)]

    reference, continued = lab.run(main)
    assert continued == reference


def test_a_copy_of_many_legs_and_another_width(lab):
    """More pages than one visit moves, to programs that move fewer at a time."""
    narrow = Programs(lab.model, Geometry(40, 8, 4, 32, 200, move_pages=3))

    async def main():
        transport = Mesh()
        one = shown(lab, transport, "one", place(0))
        two = shown(lab, transport, "two", place(1), programs=narrow)
        count = 3 * LEG_PARTS * 2 + 1
        home, blocks = await filled(lab, one, count)
        away = two.reserve(count)
        out = await done(transport, Copy(one.regions(home), two.regions(away), checksum=True))
        back = one.reserve(count - 10)
        again = await done(transport, Copy(two.regions(away[10:]), one.regions(back)))
        return blocks, await bytes_of(two, away), await bytes_of(one, back), out[0], again[0]

    blocks, arrived, returned, out, again = lab.run(main)
    assert out.error is None
    assert again.error is None
    np.testing.assert_array_equal(arrived, blocks)
    np.testing.assert_array_equal(returned, blocks[10:])
    assert len(out.checksums) == len(blocks)


def test_two_that_send_to_each_other_do_not_wait_for_each_other(lab):
    async def main():
        transport = Mesh()
        one, two = shown(lab, transport, "one", place(0, 1)), shown(lab, transport, "two", place(2, 3))
        (there, blocks), (here, other) = await filled(lab, one, 16, 1), await filled(lab, two, 16, 2)
        from_two, from_one = one.reserve(16), two.reserve(16)
        batches = []
        for start in range(0, 16, 2):
            some = slice(start, start + 2)
            batches.append([Copy(one.regions(there[some]), two.regions(from_one[some]))])
            batches.append([Copy(two.regions(here[some]), one.regions(from_two[some]))])
        results = await asyncio.gather(*(done(transport, *batch) for batch in batches))
        return results, blocks, other, await bytes_of(two, from_one), await bytes_of(one, from_two)

    results, blocks, other, at_two, at_one = lab.run(main)
    assert all(result.error is None for batch in results for result in batch)
    np.testing.assert_array_equal(at_two, blocks)
    np.testing.assert_array_equal(at_one, other)


@pytest.mark.parametrize("whose", ["source", "target"])
@pytest.mark.parametrize("when", ["before", "during"])
def test_what_changes_hands_is_stale_and_the_next_owner_is_left_alone(lab, whose, when):
    async def main():
        transport = Mesh()
        one, two = shown(lab, transport, "one", 0), shown(lab, transport, "two", 1)
        home, _ = await filled(lab, one, 2)
        away = two.reserve(2)
        copy = Copy(one.regions(home), two.regions(away))
        pages, slots = (one, home) if whose == "source" else (two, away)
        if when == "before":
            pages.free(slots)
            (result,) = await done(transport, copy)
        else:
            # The copy waits on the thread of its target, which is held up, while its pages change hands.
            held, free = threading.Event(), threading.Event()

            def hold() -> None:
                held.set()
                free.wait(10)

            two.executor.submit_host(hold)
            handle = transport.submit([copy])
            while not held.is_set():
                await asyncio.sleep(0.001)
            await one.executor.on_thread(lambda: None)  # gathered by now
            pages.free(slots)
            free.set()
            (result,) = await asyncio.wait_for(handle.future, 30)
        new = two.reserve(2)
        return result, await bytes_of(two, new)

    result, found = lab.run(main)
    assert isinstance(result.error, StaleRegion)
    if whose == "target":
        assert np.isnan(found.view(np.float32)).all(), "poisoned when it was freed, and not written after"


def test_a_cancelled_copy_is_answered_and_not_made(lab):
    async def main():
        transport = Mesh()
        one, two = shown(lab, transport, "one", 0), shown(lab, transport, "two", 1)
        home, _ = await filled(lab, one, 2)
        free = threading.Event()

        def hold() -> None:
            free.wait(10)

        one.executor.submit_host(hold)
        away = two.reserve(2)
        handle = transport.submit([Copy(one.regions(home), two.regions(away))])
        handle.cancel()
        free.set()
        (result,) = await asyncio.wait_for(handle.future, 30)
        return result, await bytes_of(two, away)

    result, found = lab.run(main)
    assert result.error is not None
    assert "cancelled" in str(result.error)
    assert np.isnan(found.view(np.float32)).all()


def test_an_instance_that_is_gone_is_named_and_the_batch_goes_on(lab):
    async def main():
        transport = Mesh()
        names = ("one", "two", "three")
        one, two, three = (shown(lab, transport, name, number) for number, name in enumerate(names))
        home, blocks = await filled(lab, one, 2)
        lost, away = two.regions(two.reserve(2)), three.reserve(2)
        await two.executor.close()
        source = one.regions(home)
        results = await done(
            transport, Copy(source, lost), Copy(lost, three.regions(away)), Copy(source, three.regions(away))
        )
        return results, blocks, await bytes_of(three, away)

    results, blocks, arrived = lab.run(main)
    assert [result.error is None for result in results] == [False, False, True]
    assert "two" in str(results[0].error)
    assert "two" in str(results[1].error)
    np.testing.assert_array_equal(arrived, blocks)


def test_pages_of_another_shape_are_refused(lab):
    other = Programs(lab.model, Geometry(40, 8, 4, 32, 200))
    other.block_shape = (*other.block_shape[:-2], other.block_shape[-1], other.block_shape[-2])  # as many bytes

    async def main():
        transport = Mesh()
        one = shown(lab, transport, "one", 0)
        two = shown(lab, transport, "two", 1, programs=other)
        home, _ = await filled(lab, one, 1)
        return await done(transport, Copy(one.regions(home), two.regions(two.reserve(1))))

    (result,) = lab.run(main)
    assert isinstance(result.error, LayoutMismatch)


def test_what_it_does_not_reach_is_refused(lab):
    async def main():
        transport = Mesh()
        one, stranger = shown(lab, transport, "one", 0), DevicePages("n0", lab.executor("two", 1))
        host = HostStore("n0", 2, lab.programs.page_bytes, name="dram")
        transport.register(host)
        mine = one.regions(one.reserve(1))
        targets: list[Region] = [stranger.regions([0]), host.regions([0]), one.regions(one.reserve(1))]
        return await done(transport, *(Copy(mine, target) for target in targets))

    assert [type(result.error) for result in lab.run(main)] == [TransferError] * 3


def test_the_engine_takes_it_between_two_instances(lab):
    async def main():
        transport = Mesh()
        engine = TransferEngine([transport], NullRecorder())
        one = DevicePages("n0", lab.executor("one", place(0, 1)), poison=True)
        two = DevicePages("n1", lab.executor("two", place(2)), poison=True)
        for pages in (one, two):
            engine.register(pages)
        home, blocks = await filled(lab, one, 9)
        away = two.reserve(9)
        sums = await engine.move(Copy(one.regions(home), two.regions(away), request_id=1, first_block=0, checksum=True))
        return sums, blocks, await bytes_of(two, away)

    sums, blocks, arrived = lab.run(main)
    np.testing.assert_array_equal(arrived, blocks)
    assert sums == tuple(xxhash.xxh3_128(block.tobytes()).digest() for block in blocks)
