"""What the jax endpoint does about pulls that do not come: there is no time-out in jax, and no way to call one off."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from endpoint_peer import buffer_of, pattern

from mcjax.errors import PeerLost, TransferCancelled, TransferTimeout
from mcjax.transfer.transports.endpoint import Spans
from mcjax.transfer.transports.secret import Secret

pytestmark = pytest.mark.check_long

SECRET = Secret(b"of the tests of jax")
ALL = Spans.of([(0, 0, 1000)])
PATIENCE_S = 30.0


@pytest.fixture
def ends() -> Iterator[list]:
    """A reader and an owner, in one process: the pull goes over loopback all the same."""
    from mcjax.transfer.transports.jax import JaxEndpoint

    made = [JaxEndpoint(SECRET, most_stuck=2), JaxEndpoint(SECRET)]
    yield made
    for endpoint in made:
        endpoint.close()


class Withheld:
    """An owner's transfer server that answers nobody, until `release`."""

    def __init__(self, stores):
        self._server, self._held = stores._server, []
        stores._server = self

    def await_pull(self, number, arrays):
        self._held.append((number, arrays))

    def release(self):
        for number, arrays in self._held:
            self._server.await_pull(number, arrays)
        self._held.clear()

    def __getattr__(self, name):
        return getattr(self._server, name)


def eventually(condition) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_pull_that_does_not_come_is_answered_and_counted_and_then_its_peer_is_not_asked(ends) -> None:
    reader, owner = ends
    withheld = Withheld(owner._stores)
    remote, local = owner.expose(pattern(1000, 1).copy()).descriptor(), reader.expose(buffer_of(1000, None))
    for number in range(3):
        results = reader.read(local, remote, ALL, deadline_s=0.2).result(PATIENCE_S)
        assert type(results.errors[0]) is TransferTimeout
        assert reader.stuck(remote) == number + 1
    results = reader.read(local, remote, ALL, deadline_s=PATIENCE_S).result(PATIENCE_S)
    assert type(results.errors[0]) is PeerLost
    assert "3 pulls" in results.errors[0].problem
    withheld.release()  # late, all of it
    eventually(lambda: reader.stuck(remote) == 0)
    assert not local.buffer.any(), "what is late lands nowhere"
    results = reader.read(local, remote, ALL, deadline_s=PATIENCE_S)
    withheld_again = threading.Timer(0.1, withheld.release)
    withheld_again.start()
    assert not results.result(PATIENCE_S).errors
    np.testing.assert_array_equal(local.buffer, pattern(1000, 1))
    withheld_again.join()


def test_what_nobody_took_is_let_go_of(ends) -> None:
    """A reader that has gone with an offer open: the owner pulls it itself, for the server forgets nothing."""
    reader, owner = ends
    remote, local = owner.expose(pattern(1000, 1).copy()).descriptor(), reader.expose(buffer_of(1000, None))
    real, reader._stores.pull = reader._stores.pull, lambda *_: real(owner._stores.address, 12345, 1000)
    assert type(reader.read(local, remote, ALL, deadline_s=0.2).result(PATIENCE_S).errors[0]) is TransferTimeout
    eventually(lambda: owner._stores.offered == 0)
    (drained,) = owner._stores.drained
    eventually(drained.is_ready)


def test_what_was_taken_is_let_go_of(ends) -> None:
    reader, owner = ends
    remote, local = owner.expose(pattern(1 << 20, 1).copy()).descriptor(), reader.expose(buffer_of(1 << 20, None))
    for _ in range(5):
        assert not reader.read(local, remote, Spans.of([(0, 0, 1 << 20)])).result(PATIENCE_S).errors
    eventually(lambda: owner._stores.offered == 0)
    assert not owner._stores.drained


def test_giving_up_ends_the_wait_for_a_pull(ends) -> None:
    reader, owner = ends
    withheld = Withheld(owner._stores)
    remote, local = owner.expose(pattern(1000, 1).copy()).descriptor(), reader.expose(buffer_of(1000, None))
    pending = reader.read(local, remote, ALL, deadline_s=PATIENCE_S * 10)
    eventually(lambda: withheld._held)
    pending.abandon()
    assert type(pending.result(PATIENCE_S).errors[0]) is TransferCancelled


def test_more_than_fits_one_pull(ends) -> None:
    from mcjax.transfer.transports.jax import GROUP_BYTES

    reader, owner = ends
    nbytes = 2 * GROUP_BYTES + 12345
    remote, local = owner.expose(pattern(nbytes, 1).copy()).descriptor(), reader.expose(buffer_of(nbytes, None))
    spans = Spans.of([(0, 0, nbytes - 100), (nbytes - 100, nbytes - 50, 50)])
    results = reader.read(local, remote, spans, checksums=True).result(PATIENCE_S)
    assert not results.errors
    assert all(results.checksums)
    expected = pattern(nbytes, 1)
    np.testing.assert_array_equal(local.buffer[: nbytes - 100], expected[: nbytes - 100])
    np.testing.assert_array_equal(local.buffer[nbytes - 100 : nbytes - 50], expected[nbytes - 50 :])
