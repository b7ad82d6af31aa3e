"""What every kind of endpoint has to refuse, and how: with the right error, and without a byte touched."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import socket
from collections.abc import Callable

import numpy as np
import pytest
import xxhash
from conformance import BIG_BYTES, EXAMPLES, PATIENCE_S, SECRET, SHORT_S, SLOW, Needs, Show, kinds_of, until
from endpoint_kinds import KINDS
from endpoint_peer import Peer, buffer_of, pattern
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.errors import AccessRefused, HandshakeRefused, StaleRegion, TransferError
from mcjax.transfer.transports.endpoint import Endpoint, RegionDescriptor, SpanResults, Spans
from mcjax.transfer.transports.secret import Secret

Move = Callable[..., SpanResults]

TOP = (1 << 63) - 1


@pytest.fixture(params=["read", "write"])
def move(request: pytest.FixtureRequest, endpoint: Endpoint, needs: Needs) -> Move:
    """Reads or writes, and waits for the answer."""
    needs(request.param)
    method = getattr(endpoint, request.param)
    return lambda *arguments, **more: method(*arguments, **more).result(PATIENCE_S)


def unharmed(peer: Peer, remote: RegionDescriptor, seed: int) -> bool:
    return peer.digest(remote) == xxhash.xxh3_128(pattern(remote.nbytes, seed).tobytes()).hexdigest()


OUTSIDE = [(0, 1000, 1), (0, 999, 2), (0, -1, 5), (-1, 0, 5), (0, 0, 0), (0, 0, -5), (0, 0, 1001), (1000, 0, 1)]
OUTSIDE += [(0, TOP, 1), (0, 1, TOP), (TOP, 0, 1), (0, TOP, TOP), (0, -TOP, TOP), (-TOP - 1, 0, 1)]


def test_spans_outside_fail_by_themselves(endpoint: Endpoint, peer: Peer, show: Show, move: Move) -> None:
    remote, local = show(1000, seed=1), endpoint.expose(buffer_of(1000, 1))
    rows = [(0, 0, 300), *OUTSIDE, (700, 700, 300)]
    results = move(local, remote, Spans.of(rows), checksums=True)
    assert kinds_of(results) == dict.fromkeys(range(1, len(rows) - 1), AccessRefused)
    assert (local.buffer == pattern(1000, 1)).all()
    assert unharmed(peer, remote, 1)
    assert [bool(digest) for digest in results.checksums] == [index not in results.errors for index in range(len(rows))]


def test_a_descriptor_that_claims_more_bytes_gets_none(
    endpoint: Endpoint, peer: Peer, show: Show, move: Move, needs: Needs
) -> None:
    """Its neighbours in memory are somebody else's."""
    needs("bounds")
    remote = show(1000, seed=1)
    lie = dataclasses.replace(remote, nbytes=1 << 40)
    local = endpoint.expose(buffer_of(8000, None))
    for offset, nbytes in ((1000, 1), (999, 2), (996, 5000), (1 << 30, 100), (TOP - 5, 5)):
        results = move(local, lie, Spans.of([(0, offset, nbytes)]), deadline_s=PATIENCE_S)
        assert kinds_of(results) == {0: AccessRefused}
    assert not local.buffer.any()
    assert unharmed(peer, remote, 1)
    assert not move(local, remote, Spans.of([(0, 0, 1)])).errors


def test_a_key_that_is_none_opens_nothing(endpoint: Endpoint, peer: Peer, show: Show, move: Move, needs: Needs) -> None:
    needs("bounds")
    remote, local = show(1000, seed=1), endpoint.expose(buffer_of(1000, None))
    for key in (0, remote.key ^ 1, remote.key ^ (1 << 63), (1 << 64) - 1):
        results = move(local, dataclasses.replace(remote, key=key), Spans.of([(0, 0, 100), (100, 100, 100)]))
        assert kinds_of(results) == {0: AccessRefused, 1: AccessRefused}
    assert not local.buffer.any()
    assert unharmed(peer, remote, 1)
    assert not move(local, remote, Spans.of([(0, 0, 1000)])).errors


def test_the_owner_counts_what_it_refused(endpoint: Endpoint, peer: Peer, show: Show, move: Move, needs: Needs) -> None:
    needs("bounds")
    remote, local = show(1000, seed=1), endpoint.expose(buffer_of(1000, None))
    before = peer.ask("stats")["refused"]
    assert move(local, dataclasses.replace(remote, key=remote.key ^ 1), Spans.of([(0, 0, 100)])).errors
    assert peer.ask("stats")["refused"] > before


@pytest.mark.parametrize("lie", [False, True])
def test_what_is_not_writable_is_not_written(
    endpoint: Endpoint, peer: Peer, show: Show, needs: Needs, lie: bool
) -> None:
    needs("write", *(["bounds"] if lie else []))
    remote = show(1000, seed=1, writable=False)
    assert not remote.writable
    local = endpoint.expose(buffer_of(1000, 2))
    asked = dataclasses.replace(remote, writable=lie)
    assert kinds_of(endpoint.write(local, asked, Spans.of([(0, 0, 100)])).result(PATIENCE_S)) == {0: AccessRefused}
    assert unharmed(peer, remote, 1)
    assert not endpoint.read(local, remote, Spans.of([(0, 0, 100)])).result(PATIENCE_S).errors


def test_reading_into_bytes_that_cannot_be_changed(endpoint: Endpoint, show: Show) -> None:
    buffer = buffer_of(1000, 2)
    buffer.flags.writeable = False
    try:
        local = endpoint.expose(buffer, writable=False)
    except AccessRefused:
        return
    results = endpoint.read(local, show(1000, seed=1), Spans.of([(0, 0, 100)])).result(PATIENCE_S)
    assert kinds_of(results) == {0: AccessRefused}
    assert (buffer == pattern(1000, 2)).all()


@pytest.mark.parametrize(
    "buffer",
    [np.zeros((4, 4), np.uint8), np.zeros(8, np.uint8)[::2], np.zeros(4, np.int32)],
    ids=["2-d", "strided", "int32"],
)
def test_what_is_not_one_piece_of_bytes_is_not_exposed(endpoint: Endpoint, buffer: np.ndarray) -> None:
    with pytest.raises(AccessRefused):
        endpoint.expose(buffer)


def test_a_read_only_buffer_is_not_exposed_as_writable(endpoint: Endpoint) -> None:
    buffer = buffer_of(1000, 2)
    buffer.flags.writeable = False
    with pytest.raises(AccessRefused, match="read-only"):
        endpoint.expose(buffer)


def test_a_local_region_must_be_known(kind: str, endpoint: Endpoint, peer: Peer, show: Show, move: Move) -> None:
    remote = show(1000, seed=1)
    spans = Spans.of([(0, 0, 100)])
    withdrawn = endpoint.expose(buffer_of(1000, None))
    endpoint.withdraw(withdrawn)
    endpoint.withdraw(withdrawn)
    other = KINDS[kind].make(SECRET)
    try:
        foreign = other.expose(buffer_of(1000, None))
        for local in (withdrawn, foreign):
            assert kinds_of(move(local, remote, spans)) == {0: AccessRefused}
            assert not local.buffer.any()
    finally:
        other.close()
    assert unharmed(peer, remote, 1)


def test_what_the_peer_withdrew_is_gone(endpoint: Endpoint, peer: Peer, move: Move, needs: Needs) -> None:
    needs("bounds")
    remote, local = peer.expose(1000, seed=1), endpoint.expose(buffer_of(1000, 1))
    spans = Spans.of([(0, 0, 1000)])
    assert not move(local, remote, spans).errors
    peer.ask("withdraw", key=remote.key)
    local.buffer[:] = 7
    for _ in range(3):
        assert issubclass(kinds_of(move(local, remote, spans))[0], AccessRefused | StaleRegion)
    assert (local.buffer == 7).all()


def test_a_descriptor_of_an_earlier_epoch_is_stale(
    endpoint: Endpoint, peer: Peer, show: Show, move: Move, needs: Needs
) -> None:
    needs("stale")
    old, local = show(1000, seed=1), endpoint.expose(buffer_of(1000, 1))
    spans = Spans.of([(0, 0, 500), (500, 500, 500)])
    assert not move(local, old, spans).errors
    peer.ask("advance", key=old.key, seed=2)
    new = RegionDescriptor.from_json(peer.ask("descriptor", key=old.key))
    assert new.epoch > old.epoch
    local.buffer[:] = 7
    assert kinds_of(move(local, old, spans)) == {0: StaleRegion, 1: StaleRegion}
    ahead = dataclasses.replace(new, epoch=new.epoch + 1)
    assert kinds_of(move(local, ahead, spans)) == {0: StaleRegion, 1: StaleRegion}
    assert (local.buffer == 7).all()
    assert unharmed(peer, new, 2)
    assert not move(local, new, spans).errors


def test_a_guard_decides_span_by_span(endpoint: Endpoint, peer: Peer, show: Show, move: Move, needs: Needs) -> None:
    needs("stale", "guards")
    remote, local = show(1000, seed=1, guarded=True), endpoint.expose(buffer_of(1000, 1))
    later = dataclasses.replace(remote, epoch=remote.epoch + 5)
    """What knows the epochs of the bytes may be further than the region."""
    spans = Spans.of((start, start, 100) for start in range(0, 1000, 100))
    assert not move(local, later, spans).errors
    assert peer.ask("guard_epochs", key=remote.key) == [later.epoch]
    peer.ask("forbid", key=remote.key, offset=250, nbytes=100)
    assert kinds_of(move(local, later, spans, checksums=True)) == {2: StaleRegion, 3: StaleRegion}
    assert unharmed(peer, remote, 1)
    peer.ask("advance", key=remote.key)
    assert set(kinds_of(move(local, remote, spans)).values()) == {StaleRegion}


@pytest.mark.parametrize("calls", [0, 1])
def test_a_guard_is_asked_before_and_after(
    endpoint: Endpoint, show: Show, move: Move, needs: Needs, calls: int
) -> None:
    needs("stale", "guards")
    remote, local = show(1000, seed=1, guard_calls=calls), endpoint.expose(buffer_of(1000, None))
    assert kinds_of(move(local, remote, Spans.of([(0, 0, 1000)]))) == {0: StaleRegion}
    assert calls or not local.buffer.any()


def test_another_secret_opens_nothing(kind: str, peer: Peer, show: Show, needs: Needs) -> None:
    needs("secret")
    remote = show(1000, seed=1)
    stranger = KINDS[kind].make(Secret(b"not the secret it is"))
    try:
        local = stranger.expose(buffer_of(1000, None))
        for name in ("read", "write"):
            if getattr(stranger.capabilities, name):
                results = getattr(stranger, name)(local, remote, Spans.of([(0, 0, 100)]), deadline_s=PATIENCE_S)
                assert kinds_of(results.result(PATIENCE_S)) == {0: HandshakeRefused}
        assert not local.buffer.any()
    finally:
        stranger.close()
    assert unharmed(peer, remote, 1)


def test_another_version_is_refused_by_name(
    kind: str, peer: Peer, show: Show, needs: Needs, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("versioned")
    remote = show(1000, seed=1)
    module, name = KINDS[kind].version_at.split(":")
    version = getattr(importlib.import_module(module), name)
    monkeypatch.setattr(importlib.import_module(module), name, version + 1 if isinstance(version, int) else b"other")
    newer = KINDS[kind].make(SECRET)
    try:
        local = newer.expose(buffer_of(1000, None))
        results = newer.read(local, remote, Spans.of([(0, 0, 100)]), deadline_s=PATIENCE_S).result(PATIENCE_S)
        assert kinds_of(results) == {0: HandshakeRefused}
        assert "version" in results.errors[0].problem
    finally:
        newer.close()


def test_connections_that_say_nothing_or_nonsense_do_no_harm(
    kind: str, endpoint: Endpoint, peer: Peer, show: Show
) -> None:
    """Others are served meanwhile, and when they are gone, nothing is held for them."""
    connect = KINDS[kind].connect
    if connect is None:
        pytest.skip(f"{kind} names no connection that could be half open")
    remote, local = show(1000, seed=1), endpoint.expose(buffer_of(1000, None))
    assert not endpoint.read(local, remote, Spans.of([(0, 0, 10)])).result(PATIENCE_S).errors
    before = peer.ask("held")
    connections = [connect(remote.address) for _ in range(6)]
    try:
        for number, connection in enumerate(connections[2:]):
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                connection.send(np.random.default_rng(number).bytes(64 << number * 2))
        connections[1].shutdown(socket.SHUT_WR)
        assert not endpoint.read(local, remote, Spans.of([(0, 0, 1000)])).result(PATIENCE_S).errors
        assert (local.buffer == pattern(1000, 1)).all()
    finally:
        for connection in connections:
            connection.close()
    until(lambda: peer.ask("held")["descriptors"] <= before["descriptors"])
    until(lambda: len(peer.ask("held")["threads"]) <= len(before["threads"]))


@settings(max_examples=EXAMPLES * 4, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_a_descriptor_of_garbage_is_refused(data: st.DataObject) -> None:
    text = RegionDescriptor("x:1", 5, 10, 0).to_json()
    values = json.loads(text)
    name = data.draw(st.sampled_from(sorted(values)))
    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    )
    garbage = json.dumps(values | {name: data.draw(anything)}) if data.draw(st.booleans()) else data.draw(st.text())
    if data.draw(st.booleans()):
        garbage = garbage[: data.draw(st.integers(0, len(garbage)))]
    try:
        descriptor = RegionDescriptor.from_json(garbage)
    except AccessRefused:
        return
    assert RegionDescriptor.from_json(descriptor.to_json()) == descriptor or "NaN" in garbage


ODD_ADDRESSES = ["", ":", "local:", "127.0.0.1:1", "nowhere", "x" * 500, "\0\0", "tcp://[::", "@" * 20, "é:ü"]


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=SLOW)
@given(
    address=st.sampled_from(ODD_ADDRESSES) | st.none(),
    key=st.integers(0, (1 << 64) - 1),
    nbytes=st.integers(0, 1 << 70),
    epoch=st.integers(0, 1 << 70),
    detail=st.dictionaries(st.text(max_size=6), st.integers() | st.text(max_size=4), max_size=3),
)
def test_a_well_formed_descriptor_of_nothing_ends_in_an_error(
    endpoint: Endpoint, show: Show, address: str | None, key: int, nbytes: int, epoch: int, detail: dict[str, object]
) -> None:
    real = show(100, seed=1)
    remote = RegionDescriptor(real.address if address is None else address, key, nbytes, epoch, True, detail)
    local = endpoint.expose(buffer_of(100, None))
    results = endpoint.read(local, remote, Spans.of([(0, 0, 100)]), deadline_s=SHORT_S).result(PATIENCE_S)
    assert isinstance(results.errors[0], TransferError)
    assert not local.buffer.any()
    endpoint.withdraw(local)


def test_detail_that_is_changed_opens_nothing_else(endpoint: Endpoint, show: Show) -> None:
    """Whatever a kind needs beside: other values of the same types must not lead to other bytes."""
    remote = show(5000, seed=1)
    local = endpoint.expose(buffer_of(5000, None))
    for name, value in remote.detail.items():
        other = value + 4096 if isinstance(value, int) else f"{value}x" if isinstance(value, str) else None
        lie = dataclasses.replace(remote, detail={**remote.detail, name: other})
        results = endpoint.read(local, lie, Spans.of([(0, 0, 5000)]), deadline_s=SHORT_S).result(PATIENCE_S)
        if not results.errors:
            assert (local.buffer == pattern(5000, 1)).all()


def test_an_endpoint_that_is_closed_says_so(kind: str, show: Show) -> None:
    remote = show(1000, seed=1)
    closed = KINDS[kind].make(SECRET)
    local = closed.expose(buffer_of(1000, None))
    closed.close()
    closed.close()
    assert isinstance(closed.read(local, remote, Spans.of([(0, 0, 9)])).result(PATIENCE_S).errors[0], TransferError)
    with pytest.raises(TransferError):
        closed.expose(buffer_of(10, None))


def test_closing_answers_what_is_under_way(kind: str, show: Show) -> None:
    remote = show(BIG_BYTES, seed=1)
    endpoint = KINDS[kind].make(SECRET)
    local = endpoint.expose(buffer_of(BIG_BYTES, None))
    pending = [endpoint.read(local, remote, Spans.of([(0, 0, BIG_BYTES)])) for _ in range(8)]
    endpoint.close()
    assert all(each.done() for each in pending)
    for each in pending:
        assert all(isinstance(error, TransferError) for error in each.result(0).errors.values())
    arrived = local.buffer.copy()
    os.sched_yield()
    assert (local.buffer == arrived).all()
