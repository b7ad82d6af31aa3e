"""What every kind of endpoint has to keep, by what it says it can: bytes go where they should, and nowhere else."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import xxhash
from conformance import EXAMPLES, MANY_SPANS, PATIENCE_S, ROUNDS, SIZES, SLOW, Needs, Show, until
from endpoint_peer import Peer, buffer_of, pattern
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.errors import AccessRefused, StaleRegion
from mcjax.transfer.transports.endpoint import Endpoint, Spans

SHAPES = [(nbytes, by, file) for nbytes in SIZES for by in (0, 1, 63) for file in (False, True) if nbytes <= 1 << 20]
LARGE = [(nbytes, 1) for nbytes in SIZES if nbytes > 1 << 20]


@pytest.mark.parametrize(("nbytes", "misaligned_by", "file"), [*SHAPES, *((*shape, False) for shape in LARGE)])
def test_reads_land_where_they_should(
    endpoint: Endpoint, show: Show, nbytes: int, misaligned_by: int, file: bool
) -> None:
    remote = show(nbytes + 10, seed=1, misaligned_by=misaligned_by, file=file)
    local = endpoint.expose(buffer_of(nbytes + 6, None, misaligned_by=misaligned_by ^ 1))
    results = endpoint.read(local, remote, Spans.of([(3, 5, nbytes)]), checksums=True).result(PATIENCE_S)
    assert not results.errors
    expected = pattern(nbytes + 10, 1)[5 : 5 + nbytes]
    assert (local.buffer[3 : 3 + nbytes] == expected).all()
    assert not local.buffer[:3].any()
    assert not local.buffer[3 + nbytes :].any()
    assert results.checksums == (xxhash.xxh3_128_digest(expected.tobytes()),)


@pytest.mark.parametrize(("nbytes", "misaligned_by", "file"), [*SHAPES, *((*shape, True) for shape in LARGE)])
def test_writes_land_where_they_should(
    endpoint: Endpoint, peer: Peer, show: Show, needs: Needs, nbytes: int, misaligned_by: int, file: bool
) -> None:
    needs("write")
    remote = show(nbytes + 10, misaligned_by=misaligned_by, file=file)
    local = endpoint.expose(buffer_of(nbytes + 6, 2, misaligned_by=misaligned_by ^ 1))
    results = endpoint.write(local, remote, Spans.of([(3, 5, nbytes)]), checksums=True).result(PATIENCE_S)
    assert not results.errors
    expected = np.zeros(nbytes + 10, np.uint8)
    expected[5 : 5 + nbytes] = local.buffer[3 : 3 + nbytes]
    assert peer.digest(remote) == xxhash.xxh3_128(expected.tobytes()).hexdigest()
    assert results.checksums == (xxhash.xxh3_128_digest(local.buffer[3 : 3 + nbytes].tobytes()),)


def scattered(seed: int, count: int, nbytes: int) -> Spans:
    """`count` spans of odd sizes, in any order on both sides; on each side no two of them meet."""
    random = np.random.default_rng(seed)
    width = nbytes // count
    sizes = random.integers(1, width, count)
    sides = [random.permutation(count) * width + random.integers(0, width - sizes + 1) for _ in range(2)]
    return Spans(sides[0].astype(np.int64), sides[1].astype(np.int64), sizes.astype(np.int64))


def moved(target: np.ndarray, source: np.ndarray, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
    for at, start, size in zip(targets, sources, sizes, strict=True):
        target[at : at + size] = source[start : start + size]


@pytest.mark.parametrize("checksums", [False, True])
def test_a_batch_of_thousands_of_spans(
    endpoint: Endpoint, peer: Peer, show: Show, needs: Needs, checksums: bool
) -> None:
    nbytes = MANY_SPANS * 211
    spans = scattered(3, MANY_SPANS, nbytes)
    remote = show(nbytes, seed=1)
    local = endpoint.expose(buffer_of(nbytes, None))
    results = endpoint.read(local, remote, spans, checksums=checksums).result(PATIENCE_S)
    assert not results.errors
    expected = np.zeros(nbytes, np.uint8)
    moved(expected, pattern(nbytes, 1), spans.local, spans.remote, spans.nbytes)
    assert (local.buffer == expected).all()
    if checksums:
        ends = zip(spans.local, spans.local + spans.nbytes, strict=True)
        assert results.checksums == tuple(xxhash.xxh3_128_digest(expected[a:b].tobytes()) for a, b in ends)
    needs("write")
    local.buffer[:] = pattern(nbytes, 4)
    results = endpoint.write(local, remote, spans, checksums=checksums).result(PATIENCE_S)
    assert not results.errors
    there = pattern(nbytes, 1).copy()
    moved(there, local.buffer, spans.remote, spans.local, spans.nbytes)
    assert peer.digest(remote) == xxhash.xxh3_128(there.tobytes()).hexdigest()
    if checksums:
        ends = zip(spans.local, spans.local + spans.nbytes, strict=True)
        assert results.checksums == tuple(xxhash.xxh3_128_digest(local.buffer[a:b].tobytes()) for a, b in ends)


def test_nothing_asked_is_answered(endpoint: Endpoint, show: Show) -> None:
    remote, local = show(64, seed=1), endpoint.expose(buffer_of(64, None))
    results = endpoint.read(local, remote, Spans.of([])).result(PATIENCE_S)
    assert not results.errors
    assert not results.checksums


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_any_spans_do_as_a_slice_does(endpoint: Endpoint, peer: Peer, show: Show, data: st.DataObject) -> None:
    nbytes = data.draw(st.integers(1, 3000))
    cuts = data.draw(st.lists(st.integers(0, nbytes), max_size=12).map(lambda cuts: sorted({0, nbytes, *cuts})))
    order = data.draw(st.permutations(range(len(cuts) - 1)))
    rows = [(cuts[at], cuts[at], cuts[at + 1] - cuts[at]) for at in order]
    shift = data.draw(st.integers(0, 70))
    spans = Spans.of((at + shift, start, size) for at, start, size in rows)
    remote = show(nbytes, seed=6)
    local = endpoint.expose(buffer_of(nbytes + shift, None))
    assert not endpoint.read(local, remote, spans).result(PATIENCE_S).errors
    assert (local.buffer[shift:] == pattern(nbytes, 6)).all()
    assert not local.buffer[:shift].any()
    if endpoint.capabilities.write:
        local.buffer[:] = pattern(nbytes + shift, 7)
        assert not endpoint.write(local, remote, spans).result(PATIENCE_S).errors
        assert peer.digest(remote) == xxhash.xxh3_128(local.buffer[shift:].tobytes()).hexdigest()
    endpoint.withdraw(local)


def test_batches_of_several_threads_do_not_meet(endpoint: Endpoint, peer: Peer, show: Show) -> None:
    nbytes, problems = 200_000, list[str]()
    remotes = [show(nbytes, seed=seed) for seed in range(4)]

    def work(number: int) -> None:
        local = endpoint.expose(buffer_of(nbytes, None))
        for turn in range(ROUNDS):
            spans = scattered(number * 100 + turn, 40, nbytes)
            local.buffer[:] = 0
            pending = [endpoint.read(local, remotes[number], spans)]
            results = [each.result(PATIENCE_S) for each in pending]
            expected = np.zeros(nbytes, np.uint8)
            moved(expected, pattern(nbytes, number), spans.local, spans.remote, spans.nbytes)
            if any(result.errors for result in results) or not (local.buffer == expected).all():
                problems.append(f"thread {number}, turn {turn}: {results}")
        if endpoint.capabilities.write:
            local.buffer[:] = pattern(nbytes, 50 + number)
            whole = Spans.of((start, start, 50_000) for start in range(0, nbytes, 50_000))
            if endpoint.write(local, remotes[number], whole).result(PATIENCE_S).errors:
                problems.append(f"thread {number}: write")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not problems
    if endpoint.capabilities.write:
        for number, remote in enumerate(remotes):
            assert peer.digest(remote) == xxhash.xxh3_128(pattern(nbytes, 50 + number).tobytes()).hexdigest()


def test_many_batches_at_once_are_all_answered(endpoint: Endpoint, show: Show) -> None:
    count, nbytes = 20 * ROUNDS, 30_000
    remote = show(nbytes, seed=1)
    locals_ = [endpoint.expose(buffer_of(nbytes, None)) for _ in range(8)]
    spans = Spans.of([(0, 0, nbytes)])
    pending = [endpoint.read(locals_[number % 8], remote, spans) for number in range(count)]
    assert not any(each.result(PATIENCE_S).errors for each in pending)
    assert all((local.buffer == pattern(nbytes, 1)).all() for local in locals_)
    stats = endpoint.stats()
    assert stats.bytes_read == count * nbytes
    assert stats.spans == count
    assert not stats.in_flight_bytes


def test_a_checksum_tells_of_the_bytes_that_arrived(endpoint: Endpoint, peer: Peer, show: Show, needs: Needs) -> None:
    needs("checksums")
    nbytes = 300_001
    remote, local = show(nbytes, seed=1), endpoint.expose(buffer_of(nbytes, None))
    spans = Spans.of([(0, 0, 1000), (1000, 1000, nbytes - 1000)])
    good = endpoint.read(local, remote, spans, checksums=True).result(PATIENCE_S)
    peer.ask("poke", key=remote.key, offset=nbytes - 1)
    broken = endpoint.read(local, remote, spans, checksums=True).result(PATIENCE_S)
    assert not good.errors
    assert not broken.errors
    assert broken.checksums[0] == good.checksums[0]
    assert broken.checksums[1] != good.checksums[1]
    assert broken.checksums[1] == xxhash.xxh3_128_digest(local.buffer[1000:].tobytes())


def test_no_checksum_unless_asked(endpoint: Endpoint, show: Show) -> None:
    remote, local = show(100, seed=1), endpoint.expose(buffer_of(100, None))
    assert endpoint.read(local, remote, Spans.of([(0, 0, 100)])).result(PATIENCE_S).checksums == ()


def test_a_notice_comes_after_the_last_byte(endpoint: Endpoint, peer: Peer, show: Show, needs: Needs) -> None:
    needs("write", "notify")
    nbytes = 2_000_003
    remote = show(nbytes)
    before = len(peer.ask("told"))
    numbers = [0, 1, 2**32 - 1]
    for number in numbers:
        local = endpoint.expose(buffer_of(nbytes, number % 97))
        spans = Spans.of((start, start, min(70_000, nbytes - start)) for start in range(0, nbytes, 70_000))
        assert not endpoint.write(local, remote, spans, notify=number).result(PATIENCE_S).errors
        until(lambda: len(peer.ask("told")) > before + numbers.index(number))  # noqa: B023
    assert peer.ask("told")[before:] == [[remote.key, number] for number in numbers]
    digests = [xxhash.xxh3_128(pattern(nbytes, number % 97).tobytes()).hexdigest() for number in numbers]
    assert peer.ask("seen_when_told")[before:] == digests


def test_a_write_that_failed_is_no_news(endpoint: Endpoint, peer: Peer, show: Show, needs: Needs) -> None:
    needs("write", "notify")
    remote, local = show(1000), endpoint.expose(buffer_of(1000, 1))
    before = len(peer.ask("told"))
    assert endpoint.write(local, remote, Spans.of([(0, 500, 501)]), notify=7).result(PATIENCE_S).errors
    assert not endpoint.write(local, remote, Spans.of([(0, 500, 500)]), notify=8).result(PATIENCE_S).errors
    until(lambda: len(peer.ask("told")) > before)
    assert peer.ask("told")[before:] == [[remote.key, 8]]


def test_who_is_slow_to_take_notices_is_still_read(endpoint: Endpoint, peer: Peer, show: Show, needs: Needs) -> None:
    needs("write", "notify")
    remote, local = show(1000, seed=1), endpoint.expose(buffer_of(1000, 2))
    peer.ask("take_notices_slowly", seconds=0.3)
    try:
        written = endpoint.write(local, remote, Spans.of([(0, 0, 1)]), notify=1)
        other = endpoint.expose(buffer_of(1000, None))
        assert not endpoint.read(other, remote, Spans.of([(1, 1, 999)])).result(PATIENCE_S).errors
        assert (other.buffer[1:] == pattern(1000, 1)[1:]).all()
        assert not written.result(PATIENCE_S).errors
    finally:
        peer.ask("take_notices_slowly", seconds=0.0)


def test_what_is_asked_of_its_peers_is_counted(endpoint: Endpoint, show: Show, needs: Needs) -> None:
    remote, local = show(1000, seed=1), endpoint.expose(buffer_of(1000, None))
    endpoint.read(local, remote, Spans.of([(0, 0, 400), (400, 400, 601)])).result(PATIENCE_S)
    stats = endpoint.stats()
    assert (stats.bytes_read, stats.bytes_written) == (400, 0)
    assert (stats.spans, stats.errors, stats.in_flight_bytes) == (2, 1, 0)
    needs("write")
    endpoint.write(local, remote, Spans.of([(0, 0, 300)])).result(PATIENCE_S)
    assert endpoint.stats().bytes_written == 300


def test_a_layout_travels_with_its_descriptor(show: Show) -> None:
    assert show(100, layout={"page_tokens": 16, "names": ["k", "v"]}).layout == {
        "page_tokens": 16,
        "names": ["k", "v"],
    }


def test_a_view_shows_the_bytes_themselves(endpoint: Endpoint, peer: Peer, show: Show, needs: Needs) -> None:
    needs("views")
    remote = show(100_000, seed=1, file=True)
    view: Any = getattr(endpoint, "view")  # noqa: B009  no part of every endpoint
    with view(remote, 5, 9000) as seen:
        assert (seen == pattern(100_000, 1)[5:9005]).all()
        with pytest.raises(ValueError, match="read-only"):
            seen[0] = 1
        peer.ask("poke", key=remote.key, offset=5)
        assert seen[0] == pattern(100_000, 1)[5] ^ 0x40
    for offset, nbytes in ((0, 100_001), (-1, 5), (100_000, 1), (0, 0)):
        with pytest.raises(AccessRefused):
            view(remote, offset, nbytes).__enter__()
    looking = view(remote, 0, 10)
    looking.__enter__()
    peer.ask("advance", key=remote.key)
    with pytest.raises(StaleRegion):
        looking.__exit__(None, None, None)
    with pytest.raises(StaleRegion):
        view(remote, 0, 10).__enter__()
