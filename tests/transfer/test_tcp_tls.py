"""TLS around the connections, with certificates made by `openssl` for these tests."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from endpoint_peer import buffer_of, pattern

from mcjax.errors import ConfigError, HandshakeRefused, StaleRegion, TransferTimeout
from mcjax.transfer.transports.endpoint import Spans
from mcjax.transfer.transports.secret import Secret
from mcjax.transfer.transports.tcp import TcpEndpoint, Tls

SECRET = Secret(b"the secret of these tests")
PATIENCE_S = 30.0
NBYTES = 20 << 20

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make certificates with")


def issue(folder: Path, name: str, authority: str = "") -> None:
    """`name.pem` and `name.key`, signed by the authority, or as one."""
    common = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}"]
    signed = ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key"] if authority else []
    more = (
        ["-addext", "basicConstraints=critical,CA:FALSE", "-addext", f"subjectAltName=DNS:{name}"] if authority else []
    )
    subprocess.run([*common, *files, *signed, *more], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    issue(folder, "authority")
    issue(folder, "node", "authority")
    issue(folder, "other-authority")
    issue(folder, "stranger", "other-authority")
    return folder


@pytest.fixture
def tls(folder: Path) -> Tls:
    return Tls.from_files(folder / "node.pem", folder / "node.key", folder / "authority.pem")


@pytest.fixture
def shower(tls: Tls) -> Iterator[TcpEndpoint]:
    endpoint = TcpEndpoint(SECRET, tls=tls, stall_s=5.0)
    yield endpoint
    endpoint.close()


@pytest.fixture
def asker(tls: Tls) -> Iterator[TcpEndpoint]:
    endpoint = TcpEndpoint(SECRET, tls=tls)
    yield endpoint
    endpoint.close()


def spans(nbytes: int = NBYTES) -> Spans:
    return Spans.of((at, at, nbytes // 10) for at in range(0, nbytes, nbytes // 10))


def test_bytes_go_both_ways(asker: TcpEndpoint, shower: TcpEndpoint) -> None:
    shown, local = shower.expose(buffer_of(NBYTES, 1)), asker.expose(buffer_of(NBYTES, None))
    told: list[int] = []
    shower.on_notice(lambda key, number: told.append(number))
    for size in (10, 1000, NBYTES):
        assert not asker.read(local, shown.descriptor(), spans(size)).result(PATIENCE_S).errors
    assert (local.buffer == pattern(NBYTES, 1)).all()
    local.buffer[:] = pattern(NBYTES, 2)
    results = asker.write(local, shown.descriptor(), spans(), checksums=True, notify=5).result(PATIENCE_S)
    assert not results.errors
    assert (shown.buffer == pattern(NBYTES, 2)).all()
    assert told == [5]


def test_what_changes_hands_is_stale(asker: TcpEndpoint, shower: TcpEndpoint) -> None:
    shown, local = shower.expose(buffer_of(1000, 1)), asker.expose(buffer_of(1000, None))
    old = shown.descriptor()
    shown.advance()
    results = asker.read(local, old, spans(1000)).result(PATIENCE_S)
    assert {type(error) for error in results.errors.values()} == {StaleRegion}
    assert not asker.read(local, shown.descriptor(), spans(1000)).result(PATIENCE_S).errors


def test_a_deadline_ends_a_transfer_under_way(asker: TcpEndpoint, shower: TcpEndpoint) -> None:
    """A guard that dawdles stands in for a peer that does."""
    dawdle = threading.Event()

    def guard(offset: int, nbytes: int, epoch: int) -> bool:
        return not dawdle.wait(PATIENCE_S)

    shown, local = shower.expose(buffer_of(1000, 1), guard=guard), asker.expose(buffer_of(1000, None))
    results = asker.read(local, shown.descriptor(), spans(1000), deadline_s=0.2).result(PATIENCE_S)
    dawdle.set()
    assert {type(error) for error in results.errors.values()} == {TransferTimeout}


def test_a_certificate_of_another_authority_is_refused(folder: Path, shower: TcpEndpoint) -> None:
    trusting = Tls.from_files(folder / "stranger.pem", folder / "stranger.key", folder / "authority.pem")
    wary = Tls.from_files(folder / "node.pem", folder / "node.key", folder / "other-authority.pem")
    shown = shower.expose(buffer_of(1000, 1))
    for tls in (trusting, wary):
        endpoint = TcpEndpoint(SECRET, tls=tls)
        try:
            local = endpoint.expose(buffer_of(1000, None))
            results = endpoint.read(local, shown.descriptor(), spans(1000), deadline_s=PATIENCE_S).result(PATIENCE_S)
            assert {type(error) for error in results.errors.values()} == {HandshakeRefused}
            assert not local.buffer.any()
        finally:
            endpoint.close()


def test_names_are_checked_where_one_is_given(folder: Path, shower: TcpEndpoint) -> None:
    shown = shower.expose(buffer_of(1000, 1))
    files = folder / "node.pem", folder / "node.key", folder / "authority.pem"
    for name, good in (("node", True), ("another", False)):
        endpoint = TcpEndpoint(SECRET, tls=Tls.from_files(*files, server_name=name))
        try:
            local = endpoint.expose(buffer_of(1000, None))
            results = endpoint.read(local, shown.descriptor(), spans(1000), deadline_s=PATIENCE_S).result(PATIENCE_S)
            assert {type(error) for error in results.errors.values()} == (set() if good else {HandshakeRefused})
        finally:
            endpoint.close()


def test_one_side_without_tls_is_told_so(tls: Tls) -> None:
    plain, secure = TcpEndpoint(SECRET), TcpEndpoint(SECRET, tls=tls)
    try:
        for asker, shower in ((plain, secure), (secure, plain)):
            shown, local = shower.expose(buffer_of(1000, 1)), asker.expose(buffer_of(1000, None))
            results = asker.read(local, shown.descriptor(), spans(1000), deadline_s=PATIENCE_S).result(PATIENCE_S)
            assert {type(error) for error in results.errors.values()} == {HandshakeRefused}
            assert "TLS" in results.errors[0].problem
    finally:
        plain.close()
        secure.close()


def test_the_secret_is_asked_for_all_the_same(tls: Tls, shower: TcpEndpoint) -> None:
    stranger = TcpEndpoint(Secret(b"a secret of somebody else"), tls=tls)
    try:
        shown, local = shower.expose(buffer_of(1000, 1)), stranger.expose(buffer_of(1000, None))
        results = stranger.read(local, shown.descriptor(), spans(1000), deadline_s=PATIENCE_S).result(PATIENCE_S)
        assert {type(error) for error in results.errors.values()} == {HandshakeRefused}
    finally:
        stranger.close()


def test_files_that_cannot_be_used_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.pem"):
        Tls.from_files(tmp_path / "nothing.pem", folder / "node.key", folder / "authority.pem")
