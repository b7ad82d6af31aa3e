"""What every kind of endpoint has to bear: peers that die or stand still, and regions that go in the middle of it all.

Whoever waits is told; what arrives late lands nowhere; nothing is left behind.
"""

from __future__ import annotations

import os
import random
import threading
import time

import numpy as np
import pytest
import xxhash
from conformance import (
    BIG_BYTES,
    PATIENCE_S,
    ROUNDS,
    SECRET,
    SHORT_S,
    SMALL,
    WATCH_S,
    Needs,
    Show,
    kinds_of,
    until,
)
from endpoint_kinds import KINDS
from endpoint_peer import Peer, buffer_of, pattern, peer_of

from mcjax.errors import (
    AccessRefused,
    PeerLost,
    StaleRegion,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from mcjax.transfer.transports.endpoint import Endpoint, Pending, RegionDescriptor, Spans

PIECES = 16
WHOLE = Spans.of((start, start, BIG_BYTES // PIECES) for start in range(0, BIG_BYTES, BIG_BYTES // PIECES))
GONE = (PeerLost, TransferTimeout)


def unchanged_from_now(buffers: list[np.ndarray]) -> None:
    """Canaries: whatever still writes there is seen."""
    for number, buffer in enumerate(buffers):
        buffer[:] = 0xA0 + number
    time.sleep(WATCH_S)
    for number, buffer in enumerate(buffers):
        assert (buffer == 0xA0 + number).all()


def check(pending: Pending, local: np.ndarray, expected: np.ndarray, allowed: tuple[type[TransferError], ...]) -> int:
    """Every span has arrived as it should, or failed with an allowed error. How many arrived."""
    results = pending.result(PATIENCE_S)
    strange = {index: error for index, error in results.errors.items() if not isinstance(error, allowed)}
    assert not strange
    good = [index for index in range(len(WHOLE)) if index not in results.errors]
    for index in good:
        start, stop = WHOLE.local[index], WHOLE.local[index] + WHOLE.nbytes[index]
        assert (local[start:stop] == expected[start:stop]).all(), f"span {index} is said to be there"
    return len(good)


def test_a_peer_killed_before(endpoint: Endpoint, another_peer: Peer, needs: Needs) -> None:
    needs("death")
    remote, local = another_peer.expose(BIG_BYTES, seed=1), endpoint.expose(buffer_of(BIG_BYTES, None))
    another_peer.kill()
    results = endpoint.read(local, remote, WHOLE, deadline_s=10 * PATIENCE_S).result(PATIENCE_S)
    assert set(kinds_of(results).values()) == {PeerLost}
    assert len(results.errors) == PIECES
    assert not local.buffer.any()


def test_a_peer_killed_after(kind: str, endpoint: Endpoint, another_peer: Peer, needs: Needs) -> None:
    needs("death")
    remote, local = another_peer.expose(BIG_BYTES, seed=1), endpoint.expose(buffer_of(BIG_BYTES, None))
    assert not endpoint.read(local, remote, WHOLE).result(PATIENCE_S).errors
    another_peer.kill()
    for name in ("read", "write"):
        if getattr(endpoint.capabilities, name):
            pending = getattr(endpoint, name)(local, remote, WHOLE, deadline_s=10 * PATIENCE_S)
            assert set(kinds_of(pending.result(PATIENCE_S)).values()) == {PeerLost}
    assert (local.buffer == pattern(BIG_BYTES, 1)).all()
    heir = peer_of(kind, SECRET)
    try:
        remote = heir.expose(BIG_BYTES, seed=2)
        assert not endpoint.read(local, remote, WHOLE).result(PATIENCE_S).errors
        assert (local.buffer == pattern(BIG_BYTES, 2)).all()
    finally:
        heir.close()


@pytest.mark.parametrize("turn", range(2 if SMALL else 3))
def test_a_peer_killed_during(kind: str, endpoint: Endpoint, another_peer: Peer, needs: Needs, turn: int) -> None:
    """Reads and writes, all under way; the more turns, the more places it is killed at."""
    needs("death")
    remote = another_peer.expose(BIG_BYTES, seed=1)
    locals_ = [endpoint.expose(buffer_of(BIG_BYTES, None)) for _ in range(4)]
    source = endpoint.expose(buffer_of(BIG_BYTES, 1))
    assert not endpoint.read(locals_[0], remote, WHOLE).result(PATIENCE_S).errors
    reads = [endpoint.read(local, remote, WHOLE, deadline_s=10 * PATIENCE_S) for local in locals_]
    writes: list[Pending] = []
    if endpoint.capabilities.write:
        writes = [endpoint.write(source, remote, WHOLE, deadline_s=10 * PATIENCE_S) for _ in range(3)]
    time.sleep(random.Random(turn).random() * 0.01)
    another_peer.kill()
    for local, read in zip(locals_, reads, strict=True):
        check(read, local.buffer, pattern(BIG_BYTES, 1), (PeerLost,))
    for write in writes:
        assert set(kinds_of(write.result(PATIENCE_S)).values()) <= {PeerLost}
    unchanged_from_now([local.buffer for local in locals_])
    assert not endpoint.stats().in_flight_bytes


def test_a_peer_that_stands_still_costs_its_deadline(endpoint: Endpoint, another_peer: Peer, needs: Needs) -> None:
    """Then it goes on, and what it still had to send lands nowhere."""
    needs("stopped")
    remote = another_peer.expose(BIG_BYTES, seed=1)
    unseen = another_peer.expose(BIG_BYTES, seed=2)
    local, other, source = (endpoint.expose(buffer_of(BIG_BYTES, None)) for _ in range(3))
    assert not endpoint.read(local, remote, WHOLE).result(PATIENCE_S).errors
    another_peer.stop()
    reads = [endpoint.read(local, remote, WHOLE, deadline_s=SHORT_S)]
    reads.append(endpoint.read(other, unseen, WHOLE, deadline_s=SHORT_S))
    writes: list[Pending] = []
    if endpoint.capabilities.write:
        writes.append(endpoint.write(source, remote, WHOLE, deadline_s=SHORT_S))
    first = check(reads[0], local.buffer, pattern(BIG_BYTES, 1), (TransferTimeout,))
    check(reads[1], other.buffer, pattern(BIG_BYTES, 2), (TransferTimeout,))
    if not endpoint.capabilities.one_sided:
        assert first < PIECES
        for write in writes:
            assert TransferTimeout in kinds_of(write.result(PATIENCE_S)).values()
    for write in writes:
        assert set(kinds_of(write.result(PATIENCE_S)).values()) <= {TransferTimeout}
    local.buffer[:], other.buffer[:] = 0xA0, 0xA1
    another_peer.go_on()
    unchanged_from_now([local.buffer, other.buffer])
    again = endpoint.read(local, another_peer.expose(BIG_BYTES, seed=3), WHOLE, deadline_s=PATIENCE_S)
    assert check(again, local.buffer, pattern(BIG_BYTES, 3), ()) == PIECES
    assert not endpoint.stats().in_flight_bytes


def test_a_peer_that_stands_still_holds_up_nobody_else(
    endpoint: Endpoint, another_peer: Peer, show: Show, needs: Needs
) -> None:
    needs("stopped")
    silent, remote = another_peer.expose(BIG_BYTES, seed=1), show(BIG_BYTES, seed=2)
    waiting, local = (endpoint.expose(buffer_of(BIG_BYTES, None)) for _ in range(2))
    another_peer.stop()
    pending = [endpoint.read(waiting, silent, WHOLE, deadline_s=PATIENCE_S) for _ in range(8)]
    assert not endpoint.read(local, remote, WHOLE, deadline_s=PATIENCE_S).result(PATIENCE_S).errors
    assert (local.buffer == pattern(BIG_BYTES, 2)).all()
    another_peer.kill()
    for each in pending:
        check(each, waiting.buffer, pattern(BIG_BYTES, 1), GONE)


def test_closing_beside_a_peer_that_stands_still(kind: str, another_peer: Peer, needs: Needs) -> None:
    needs("stopped")
    endpoint = KINDS[kind].make(SECRET)
    remote, local = another_peer.expose(BIG_BYTES, seed=1), endpoint.expose(buffer_of(BIG_BYTES, None))
    assert not endpoint.read(local, remote, WHOLE).result(PATIENCE_S).errors
    another_peer.stop()
    pending = [endpoint.read(local, remote, WHOLE) for _ in range(3)]
    closing = threading.Thread(target=endpoint.close)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    for each in pending:
        assert each.done()
        check(each, local.buffer, pattern(BIG_BYTES, 1), (TransferError,))
    another_peer.go_on()
    unchanged_from_now([local.buffer])


def test_given_up_at_any_time(endpoint: Endpoint, peer: Peer, show: Show, needs: Needs) -> None:
    """It is answered soon whatever happens, in full or cancelled, and then its place is free for others."""
    needs("abandon")
    remote = show(BIG_BYTES, seed=1)
    names = [name for name in ("read", "write") if getattr(endpoint.capabilities, name)]
    chance = random.Random(1)
    locals_ = [endpoint.expose(buffer_of(BIG_BYTES, 1)) for _ in range(3)]
    for turn in range(ROUNDS):
        name = names[turn % len(names)]
        pending = [getattr(endpoint, name)(local, remote, WHOLE, deadline_s=PATIENCE_S) for local in locals_]
        time.sleep(chance.random() * 0.004)
        for each in chance.sample(pending, 2):
            each.abandon()
        for local, each in zip(locals_, pending, strict=True):
            check(each, local.buffer, pattern(BIG_BYTES, 1), (TransferCancelled,) if each.abandoned else ())
    for local in locals_:
        abandoned = endpoint.read(local, remote, WHOLE, deadline_s=PATIENCE_S)
        abandoned.abandon()
        abandoned.result(PATIENCE_S)
    unchanged_from_now([local.buffer for local in locals_])
    assert not endpoint.stats().in_flight_bytes


def test_what_has_not_begun_when_given_up_is_not_moved(endpoint: Endpoint, another_peer: Peer, needs: Needs) -> None:
    needs("abandon", "stopped", "write")
    remote, local = another_peer.expose(BIG_BYTES, seed=1), endpoint.expose(buffer_of(BIG_BYTES, 2))
    assert not endpoint.read(endpoint.expose(buffer_of(9, None)), remote, Spans.of([(0, 0, 9)])).result(30).errors
    another_peer.stop()
    pending = [endpoint.write(local, remote, WHOLE, deadline_s=PATIENCE_S) for _ in range(8)]
    time.sleep(WATCH_S)  # they are on their way
    for each in pending:
        each.abandon()
    another_peer.go_on()
    ended = [kinds_of(each.result(PATIENCE_S)) for each in pending]
    assert {kind for kinds in ended for kind in kinds.values()} <= {TransferCancelled}
    if endpoint.capabilities.one_sided and endpoint.capabilities.other_host:
        return  # the card writes on its own, whether the peer stands still or not
    assert PIECES in map(len, ended), "the last one cannot have begun when the peer learnt that nobody wants it"


@pytest.mark.parametrize("whose", ["local", "remote"])
def test_a_region_withdrawn_in_flight(endpoint: Endpoint, peer: Peer, needs: Needs, whose: str) -> None:
    if whose == "remote":
        needs("bounds")
    for turn in range(ROUNDS // 2):
        remote = peer.expose(BIG_BYTES, seed=1)
        locals_ = [endpoint.expose(buffer_of(BIG_BYTES, None)) for _ in range(3)]
        reads = [endpoint.read(local, remote, WHOLE, deadline_s=PATIENCE_S) for local in locals_]
        time.sleep(random.Random(turn).random() * 0.004)
        if whose == "remote":
            peer.ask("withdraw", key=remote.key)
        else:
            for local in locals_:
                endpoint.withdraw(local)
            arrived = [local.buffer.copy() for local in locals_]
            unchanged = all((local.buffer == before).all() for local, before in zip(locals_, arrived, strict=True))
            assert unchanged
            unchanged_from_now([local.buffer for local in locals_])
        for local, read, seed in zip(locals_, reads, (1, 1, 1), strict=True):
            if whose == "remote":
                check(read, local.buffer, pattern(BIG_BYTES, seed), (AccessRefused, StaleRegion, TransferCancelled))
            else:
                results = read.result(PATIENCE_S)
                allowed = {AccessRefused, StaleRegion, TransferCancelled}
                assert set(kinds_of(results).values()) <= allowed
        for local in locals_:
            endpoint.withdraw(local)
        if whose == "local":
            peer.ask("withdraw", key=remote.key)
    assert not endpoint.stats().in_flight_bytes


def test_a_region_withdrawn_under_writes(endpoint: Endpoint, peer: Peer, needs: Needs) -> None:
    needs("write", "bounds")
    local = endpoint.expose(buffer_of(BIG_BYTES, 2))
    for turn in range(ROUNDS // 2):
        remote = peer.expose(BIG_BYTES, seed=1)
        writes = [endpoint.write(local, remote, WHOLE, deadline_s=PATIENCE_S) for _ in range(3)]
        time.sleep(random.Random(turn).random() * 0.004)
        peer.ask("withdraw_and_watch", key=remote.key, seconds=WATCH_S / 5)
        for write in writes:
            kinds = set(kinds_of(write.result(PATIENCE_S)).values())
            assert kinds <= {AccessRefused, StaleRegion, TransferCancelled}


def test_what_is_read_while_it_changes_hands_is_whole_or_stale(endpoint: Endpoint, peer: Peer, needs: Needs) -> None:
    """Never some of the old bytes and some of the new ones, said to be good."""
    needs("stale")
    for turn in range(ROUNDS):
        old = peer.expose(BIG_BYTES, seed=1)
        locals_ = [endpoint.expose(buffer_of(BIG_BYTES, None)) for _ in range(3)]
        reads = [endpoint.read(local, old, WHOLE, deadline_s=PATIENCE_S) for local in locals_]
        time.sleep(random.Random(turn).random() * 0.004)
        peer.ask("advance", key=old.key, seed=2)
        for local, read in zip(locals_, reads, strict=True):
            check(read, local.buffer, pattern(BIG_BYTES, 1), (StaleRegion,))
            endpoint.withdraw(local)
        peer.ask("withdraw", key=old.key)


def test_what_was_sent_to_an_earlier_owner_never_lands(endpoint: Endpoint, peer: Peer, needs: Needs) -> None:
    needs("stale", "write")
    local = endpoint.expose(buffer_of(BIG_BYTES, 3))
    for turn in range(ROUNDS):
        old = peer.expose(BIG_BYTES, seed=1)
        writes = [endpoint.write(local, old, WHOLE, deadline_s=PATIENCE_S) for _ in range(3)]
        time.sleep(random.Random(turn).random() * 0.004)
        peer.ask("advance", key=old.key, seed=2)
        for write in writes:
            assert set(kinds_of(write.result(PATIENCE_S)).values()) <= {StaleRegion}
        assert peer.digest(old) == xxhash.xxh3_128(pattern(BIG_BYTES, 2).tobytes()).hexdigest()
        peer.ask("withdraw", key=old.key)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_of_an_endpoint(kind: str, peer: Peer, show: Show) -> None:
    """Here: threads, descriptors. There: what the peer held for it."""
    remote = show(BIG_BYTES, seed=1)
    guarded = show(1000, seed=1, guarded=True) if KINDS[kind].capabilities.guards else remote

    def use() -> None:
        endpoint = KINDS[kind].make(SECRET)
        local = endpoint.expose(buffer_of(BIG_BYTES, None))
        assert not endpoint.read(local, remote, WHOLE).result(PATIENCE_S).errors
        endpoint.read(local, guarded, Spans.of([(0, 0, 10)])).result(PATIENCE_S)
        if endpoint.capabilities.write:
            assert not endpoint.write(local, remote, WHOLE).result(PATIENCE_S).errors
        endpoint.read(local, remote, WHOLE)
        endpoint.close()

    use()
    until(lambda: peer.ask("held") == peer.ask("held"))
    before, threads, there = descriptors(), set(threading.enumerate()), peer.ask("held")
    for _ in range(3):
        use()
    assert set(threading.enumerate()) <= threads
    until(lambda: descriptors() <= before)
    until(lambda: peer.ask("held")["descriptors"] <= there["descriptors"])
    until(lambda: len(peer.ask("held")["threads"]) <= len(there["threads"]))


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_peer_that_goes_while_it_uses_us_is_let_go(kind: str, peer: Peer, show: Show, needs: Needs, how: str) -> None:
    """The module's peer owns the memory; another one reads and writes it all the time, until it is no more."""
    needs("death" if how == "kill" else "stopped")
    first = show(BIG_BYTES, seed=1)

    def used_by_somebody() -> None:
        user = peer_of(kind, SECRET)
        remote = RegionDescriptor.from_json(peer.ask("descriptor", key=first.key))
        try:
            user.ask("begin", descriptor=remote.to_json(), write=False, nbytes=BIG_BYTES)
            if KINDS[kind].capabilities.write:
                user.ask("begin", descriptor=remote.to_json(), write=True, nbytes=BIG_BYTES)
            time.sleep(0.02)
            if how == "stop":
                user.stop()
                peer.ask("fill", key=remote.key, seed=4)
                peer.ask("advance", key=remote.key)
            user.kill()
        finally:
            user.close()

    used_by_somebody()
    until(lambda: peer.ask("held") == peer.ask("held"))
    there = peer.ask("held")
    used_by_somebody()
    until(lambda: peer.ask("held")["descriptors"] <= there["descriptors"])
    until(lambda: len(peer.ask("held")["threads"]) <= len(there["threads"]))


def test_withdrawing_waits_for_nobody_who_stands_still(kind: str, peer: Peer, needs: Needs) -> None:
    needs("stopped")
    remote = peer.expose(BIG_BYTES, seed=1)
    user = peer_of(kind, SECRET)
    try:
        for write in (False, True) if KINDS[kind].capabilities.write else (False,):
            user.ask("begin", descriptor=remote.to_json(), write=write, nbytes=BIG_BYTES)
        time.sleep(0.02)
        user.stop()
        withdrawn = threading.Thread(
            target=peer.ask, args=("withdraw_and_watch",), kwargs={"key": remote.key, "seconds": WATCH_S}
        )
        withdrawn.start()
        withdrawn.join(PATIENCE_S)
        assert not withdrawn.is_alive()
        user.go_on()
    finally:
        user.kill()
        user.close()


def test_a_descriptor_serves_more_than_one_peer(kind: str, show: Show, needs: Needs) -> None:
    remote: RegionDescriptor = show(BIG_BYTES, seed=1)
    endpoints = [KINDS[kind].make(SECRET) for _ in range(3)]
    try:
        locals_ = [endpoint.expose(buffer_of(BIG_BYTES, None)) for endpoint in endpoints]
        reads = [one.read(local, remote, WHOLE) for one, local in zip(endpoints, locals_, strict=True)]
        for read, local in zip(reads, locals_, strict=True):
            assert check(read, local.buffer, pattern(BIG_BYTES, 1), ()) == PIECES
    finally:
        for endpoint in endpoints:
            endpoint.close()


@pytest.mark.check_long
def test_many_faults_in_any_order(kind: str, needs: Needs) -> None:
    """A seeded walk: batches, deadlines, changes of hands, stops and deaths, for as long as it takes."""
    needs("death", "stopped", "stale")
    chance = random.Random(7)
    endpoint, user = KINDS[kind].make(SECRET), peer_of(kind, SECRET)
    locals_ = [endpoint.expose(buffer_of(BIG_BYTES, None)) for _ in range(4)]
    anything = (PeerLost, StaleRegion, AccessRefused, TransferCancelled, TransferTimeout)
    try:
        for turn in range(150):
            remote = user.expose(BIG_BYTES, seed=turn)
            reads = [
                endpoint.read(local, remote, WHOLE, deadline_s=chance.choice([0.001, 0.05, PATIENCE_S]))
                for local in locals_
            ]
            time.sleep(chance.random() * 0.005)
            what = chance.choice(["advance", "withdraw", "abandon", "stop", "kill", "nothing"])
            if what == "advance":
                user.ask("advance", key=remote.key, seed=turn + 1)
            elif what == "withdraw":
                user.ask("withdraw", key=remote.key)
            elif what == "abandon":
                chance.choice(reads).abandon()
            elif what == "stop":
                user.stop()
                time.sleep(0.02)
                user.go_on()
            elif what == "kill":
                user.kill()
            for local, read in zip(locals_, reads, strict=True):
                check(read, local.buffer, pattern(BIG_BYTES, turn), anything)
            if what == "kill":
                user.close()
                user = peer_of(kind, SECRET)
            elif what != "withdraw":
                user.ask("withdraw", key=remote.key)
        assert not endpoint.stats().in_flight_bytes
    finally:
        endpoint.close()
        user.close()
