"""Which card and which of its addresses: from a tree of files as the kernel shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcjax.errors import ConfigError
from mcjax.transfer.transports.rdma.completions import Cause, cause_of, error_of
from mcjax.transfer.transports.rdma.device import Gid, choose, gids, numa_node

LINK_LOCAL = "fe80:0000:0000:0000:0202:c9ff:fe00:0001"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a00:0001"
UNSET = "0000:0000:0000:0000:0000:0000:0000:0000"


def card(sysfs: Path, name: str, table: list[tuple[str, str]], state: str = "4: ACTIVE", node: str = "-1") -> None:
    """`table`: value and kind by index; no kind where the kernel refuses to tell it."""
    port = sysfs / name / "ports" / "1"
    for folder in ("gids", "gid_attrs/types"):
        (port / folder).mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    for index, (value, kind) in enumerate(table):
        (port / "gids" / str(index)).write_text(f"{value}\n")
        if kind:
            (port / "gid_attrs" / "types" / str(index)).write_text(f"{kind}\n")
    (sysfs / name / "device").mkdir()
    (sysfs / name / "device" / "numa_node").write_text(f"{node}\n")


FULL = [(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2"), (UNSET, ""), (MAPPED, "IB/RoCE v1"), (MAPPED, "RoCE v2")]


def test_routed_addresses_come_first(tmp_path: Path) -> None:
    card(tmp_path, "mlx5_0", FULL)
    assert choose(["mlx5_0"], None, None, sysfs=tmp_path) == Gid("mlx5_0", 4, MAPPED, "RoCE v2")
    assert [gid.index for gid in gids("mlx5_0", 1, tmp_path)] == [0, 1, 3, 4]


def test_the_best_of_several_cards(tmp_path: Path) -> None:
    card(tmp_path, "a", FULL, state="1: DOWN")
    card(tmp_path, "b", FULL[:2])
    card(tmp_path, "c", FULL)
    assert choose("abc", None, None, sysfs=tmp_path).device == "c"
    assert choose("ab", None, None, sysfs=tmp_path) == Gid("b", 1, LINK_LOCAL, "RoCE v2")


def test_what_is_given_is_taken(tmp_path: Path) -> None:
    card(tmp_path, "b", FULL[:2])
    card(tmp_path, "c", FULL)
    assert choose("bc", "b", None, sysfs=tmp_path).device == "b"
    assert choose("bc", None, 3, sysfs=tmp_path) == Gid("c", 3, MAPPED, "IB/RoCE v1")
    assert choose("bc", "b", 0, sysfs=tmp_path).kind == "IB/RoCE v1"


@pytest.mark.parametrize(
    ("device", "gid_index", "port"), [("d", None, 1), ("b", 4, 1), (None, 2, 1), (None, None, 2), ("a", None, 1)]
)
def test_what_is_not_there_is_named(tmp_path: Path, device: str | None, gid_index: int | None, port: int) -> None:
    card(tmp_path, "a", FULL, state="1: DOWN")
    card(tmp_path, "b", FULL[:3])
    with pytest.raises(ConfigError, match="device"):
        choose("ab", device, gid_index, port, tmp_path)


@pytest.mark.parametrize(("text", "node"), [("-1", None), ("0", 0), ("3", 3)])
def test_the_memory_that_a_card_is_next_to(tmp_path: Path, text: str, node: int | None) -> None:
    card(tmp_path, "a", FULL, node=text)
    assert numa_node("a", tmp_path) == node
    assert numa_node("b", tmp_path) is None


@pytest.mark.parametrize(
    ("status", "cause", "kind"),
    [
        ("REM_ACCESS_ERR", Cause.REMOTE, "TransferError"),
        ("LOC_PROT_ERR", Cause.LOCAL, "AccessRefused"),
        ("RETRY_EXC_ERR", Cause.SILENT, "PeerLost"),
        ("RNR_RETRY_EXC_ERR", Cause.SILENT, "PeerLost"),
        ("WR_FLUSH_ERR", Cause.FLUSHED, "TransferError"),
        ("LOC_LEN_ERR", Cause.OTHER, "TransferError"),
        ("213", Cause.OTHER, "TransferError"),
    ],
)
def test_a_status_becomes_an_error(status: str, cause: Cause, kind: str) -> None:
    assert cause_of(status) is cause
    assert type(error_of(status)).__name__ == kind
    assert status in error_of(status).problem
