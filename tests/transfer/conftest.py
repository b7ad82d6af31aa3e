"""What the tests of the conformance suite share: a kind of endpoint, one of it here, and a peer of it elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet
from conformance import SECRET, Needs, Show
from endpoint_kinds import KINDS
from endpoint_peer import Peer, peer_of

from mcjax.transfer.transports.endpoint import Endpoint, RegionDescriptor


def _parameter(name: str) -> ParameterSet:
    mark = KINDS[name].mark
    return pytest.param(name, marks=[getattr(pytest.mark, mark)] if mark else [])


@pytest.fixture(scope="module", params=[_parameter(name) for name in sorted(KINDS)])
def kind(request: pytest.FixtureRequest) -> str:
    if missing := KINDS[request.param].missing():
        pytest.skip(missing)
    return request.param


@pytest.fixture
def needs(kind: str) -> Needs:
    """`needs("notify", ...)` skips the test for a kind that declares that it cannot."""

    def check(*names: str) -> None:
        for name in names:
            if not getattr(KINDS[kind].capabilities, name):
                pytest.skip(f"{kind} declares {name}=False")

    return check


@pytest.fixture
def endpoint(kind: str) -> Iterator[Endpoint]:
    endpoint = KINDS[kind].make(SECRET)
    yield endpoint
    endpoint.close()


@pytest.fixture(scope="module")
def peer(kind: str) -> Iterator[Peer]:
    """One for all tests of a module that leave it well."""
    peer = peer_of(kind, SECRET)
    yield peer
    peer.close()


@pytest.fixture
def another_peer(kind: str) -> Iterator[Peer]:
    """One to be killed, stopped, or to do something of its own."""
    peer = peer_of(kind, SECRET)
    yield peer
    peer.close()


@pytest.fixture
def show(peer: Peer) -> Iterator[Show]:
    """`show(nbytes, seed, ...)`: a region of the peer's, taken back after the test."""
    shown: list[int] = []

    def expose(nbytes: int, seed: int | None = None, **more: object) -> RegionDescriptor:
        descriptor = peer.expose(nbytes, seed, **more)
        shown.append(descriptor.key)
        return descriptor

    yield expose
    for key in shown:
        if key in peer.ask("keys"):
            peer.ask("withdraw", key=key)
