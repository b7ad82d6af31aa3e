"""NIXL and Mooncake where they are not installed, and what they raise in our words."""

from __future__ import annotations

import sys

import pytest

from mcjax.errors import AccessRefused, PeerLost, TransferError, TransportUnavailable
from mcjax.transfer.transports import mooncake, nixl


def test_without_nixl_the_command_that_brings_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    with pytest.raises(TransportUnavailable, match="pip install --no-deps nixl-cu12"):
        nixl.Nixl()


def test_without_mooncake_the_extra_and_the_systems_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransportUnavailable, match=r"mcjax\[peers\].*apt-get install libibverbs1 libnuma1 libcurl4"):
        mooncake.Mooncake()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nixlRemoteDisconnectError", PeerLost),
        ("nixlNotFoundError", AccessRefused),
        ("nixlUnknownError", TransferError),
    ],
)
def test_exceptions_of_nixl_are_told_in_our_words(name: str, kind: type[TransferError]) -> None:
    theirs = type(name, (Exception,), {})("NIXL_ERR_SOMETHING")
    found = nixl.translated(theirs)
    assert type(found) is kind
    assert "NIXL_ERR_SOMETHING" in found.problem
