"""HBM to DRAM and back, between executors: every byte, every refusal, and nothing that was only an alias."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import xxhash

from mcjax.backends.jax.device_store import DevicePages
from mcjax.backends.jax.device_transport import Device
from mcjax.errors import StaleRegion, TransferError
from mcjax.kvpool.stores.host import HostStore
from mcjax.transfer.base import Copy
from mcjax.types import NullRecorder


class Node:
    """An instance's pages and the host memory beside them, both poisoned when freed."""

    def __init__(self, lab, transport, name, device=0):
        self.executor = lab.executor(name, device)
        self.pages = DevicePages("n0", self.executor, poison=True)
        self.host = HostStore("n0", 24, lab.programs.page_bytes, name=f"{name}.dram", poison=True)
        transport.register(self.pages)
        transport.register(self.host)


async def done(transport, *copies):
    return await asyncio.wait_for(transport.submit(list(copies)).future, 30)


def test_a_round_trip_to_another_executor_continues_bit_for_bit(lab):
    prompt = lab.prompt(1, 100)

    async def main():
        transport = Device()
        one, two = Node(lab, transport, "one"), Node(lab, transport, "two", device=1)
        home = one.pages.reserve(20)
        token = await lab.prefill(one.executor, prompt, home)
        out = one.host.reserve(13)
        first = await done(transport, Copy(one.pages.regions(home[:13]), one.host.regions(out), checksum=True))
        reference = [token, *await lab.decode(one.executor, token, 100, home, 40)]
        kv = await lab.kv(one.executor, home, 140)
        one.pages.free(home)  # poisons: if the host bytes were an alias of the pages, they are NaN now

        two.pages.reserve(5)
        away = two.pages.reserve(20)
        second = await done(transport, Copy(one.host.regions(out), two.pages.regions(away[:13]), checksum=True))
        one.host.free(out)  # poisons: if the pages were an alias of host bytes, they are NaN now
        continued = [token, *await lab.decode(two.executor, token, 100, away, 40)]
        gone = await lab.kv(one.executor, home, 140)
        return reference, continued, kv, await lab.kv(two.executor, away, 140), first, second, gone, transport.stats()

    reference, continued, kv, other_kv, first, second, gone, stats = lab.run(main)
    assert continued == reference
    np.testing.assert_array_equal(other_kv, kv)
    assert np.isnan(gone.view(np.float32)).all()
    assert len(first[0].checksums) == 13
    assert first[0].checksums == second[0].checksums
    page = np.ascontiguousarray(kv[:, :, 8:16])
    assert first[0].checksums[1] == xxhash.xxh3_128(page.tobytes()).digest()
    assert (stats.bytes_moved, stats.copies, stats.pending_bytes) == (26 * lab.programs.page_bytes, 2, 0)


def test_one_batch_may_visit_several_executors_and_answers_in_order(lab):
    async def main():
        recorder = Recorded()
        transport = Device(recorder)
        nodes = [Node(lab, transport, f"n{k}", k % 2) for k in range(3)]
        for k, node in enumerate(nodes):
            await lab.prefill(node.executor, lab.prompt(k, 24), node.pages.reserve(3))
        copies = []
        for node in (nodes[0], nodes[2], nodes[2], nodes[1]):
            target = node.host.regions(node.host.reserve(3))
            copies.append(Copy(node.pages.regions([0, 1, 2][::-1]), target, checksum=True))
        stranger = HostStore("n0", 2, lab.programs.page_bytes, name="stranger")
        copies.insert(1, Copy(stranger.regions([0]), stranger.regions([1])))
        results = await done(transport, *copies)
        bytes_match = [
            xxhash.xxh3_128(copy.target.memory.buffer()[slot]).digest() == digest
            for copy, result in zip(copies, results, strict=True)
            for slot, digest in zip(copy.target.slots, result.checksums, strict=False)
        ]
        return results, bytes_match, recorder.payloads

    results, bytes_match, payloads = lab.run(main)
    assert [result.error is None for result in results] == [True, False, True, True, True]
    assert len(bytes_match) == 12
    assert all(bytes_match)
    assert len({result.checksums for result in results if not result.error}) == 3, "nodes hold different prompts"
    assert len(payloads) == 1
    assert payloads[0]["results"][1]["kind"] == "TransferError"


class Recorded(NullRecorder):
    def __init__(self):
        self.payloads = []

    def outcome(self, time_ns, mechanism, call, payload):
        self.payloads.append(payload)


@pytest.mark.parametrize("direction", ["out", "in"])
def test_stale_regions_are_refused_before_and_during(lab, direction):
    async def main():
        transport = Device()
        node = Node(lab, transport, "one")
        slots, kept = node.pages.reserve(2), node.host.reserve(2)
        node.host.buffer()[kept] = 1
        pages, host = node.pages.regions(slots), node.host.regions(kept)
        copy = Copy(pages, host) if direction == "out" else Copy(host, pages)

        hold = threading.Event()
        node.executor.submit_host(lambda: hold.wait(10))
        late = transport.submit([copy])
        node.pages.free(slots[:1])
        hold.set()
        [before] = await late.future

        await node.executor.on_thread(lambda: None)  # the freed page is poisoned, which writes to it
        slots = node.pages.reserve(2)
        pages = node.pages.regions(slots)
        copy = Copy(pages, host) if direction == "out" else Copy(host, pages)
        name = "read_pages" if direction == "out" else "write_pages"
        real = getattr(node.executor, name)

        def freeing(*args):
            answer = real(*args)
            node.pages.free(slots[:1])
            return answer

        setattr(node.executor, name, freeing)
        [during] = await done(transport, copy)
        return before, during, await lab.kv(node.executor, list(range(40)), 320)

    before, during, kv = lab.run(main)
    assert type(before.error) is StaleRegion
    assert "before" in str(before.error)
    assert type(during.error) is StaleRegion
    assert "during" in str(during.error)
    if direction == "in":  # the first copy left nothing behind, and the freed page of the second is poisoned
        assert (~np.isnan(kv.view(np.float32))).any(axis=(0, 1, 3, 4)).sum() == lab.geometry.page_tokens


def test_what_it_cannot_reach(lab):
    async def main():
        transport = Device()
        one, two = Node(lab, transport, "one"), Node(lab, transport, "two")
        far = HostStore("elsewhere", 4, lab.programs.page_bytes)
        transport.register(far)
        assert transport.reaches(one.pages, two.host)
        assert transport.reaches(two.host, one.pages)
        assert transport.reaches(one.pages, one.pages)
        assert not transport.reaches(one.pages, two.pages)
        assert not transport.reaches(one.host, two.host)
        assert not transport.reaches(one.pages, far)
        [result] = await done(transport, Copy(one.pages.regions([0]), far.regions([0])))
        return result

    result = lab.run(main)
    with pytest.raises(TransferError, match=r"does not reach from one\.hbm to elsewhere\.dram"):
        raise result.error


def test_a_closed_executor_is_a_typed_error(lab):
    async def main():
        transport = Device()
        node, other = Node(lab, transport, "one"), Node(lab, transport, "two")
        await node.executor.close()
        good = Copy(other.pages.regions([0]), other.host.regions([0]))
        return await done(transport, Copy(node.pages.regions([0]), node.host.regions([0])), good)

    gone, good = lab.run(main)
    assert "instance one is down" in str(gone.error)
    assert good.error is None


def test_a_page_handed_on_is_not_poisoned_under_its_new_owner(lab):
    """free, reserve and write in one breath: the poison was asked for first and must come first."""

    async def main():
        transport = Device()
        node = Node(lab, transport, "one")
        kept = node.host.reserve(1)
        node.host.buffer()[kept[0]] = np.arange(lab.programs.page_bytes) % 251
        for _ in range(20):
            [slot] = node.pages.reserve(1)
            node.pages.free([slot])
            assert node.pages.reserve(1) == [slot]
            handle = transport.submit([Copy(node.host.regions(kept), node.pages.regions([slot]))])
            await handle.future
            raw = await node.executor.on_thread(lambda slot=slot: node.executor.read_pages([slot]))
            np.testing.assert_array_equal(raw[0], node.host.buffer()[kept[0]])
            node.pages.free([slot])
        node.pages.check_integrity()

    lab.run(main)
