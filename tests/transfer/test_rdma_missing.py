"""A machine without RDMA is told apart in three ways, each with what to do. What really happens on a kernel without
verbs, and on one without a device, is in `tests/rdma`."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from mcjax.errors import TransportUnavailable
from mcjax.transfer.transports.rdma import RdmaEndpoint
from mcjax.transfer.transports.rdma.library import device_names, load
from mcjax.transfer.transports.secret import Secret


class Refused(Exception):
    """What pyverbs raises."""


def pyverbs(enums: str) -> Any:
    """An import that finds pyverbs' modules, with the constants under one of their names."""

    def imported(name: str) -> Any:
        if name.endswith("enums") and name != enums:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return SimpleNamespace(name=name, PyverbsError=Refused)

    return imported


@pytest.mark.skipif(importlib.util.find_spec("pyverbs") is not None, reason="pyverbs is here")
def test_an_endpoint_without_pyverbs_says_what_to_install() -> None:
    with pytest.raises(TransportUnavailable, match=r"No module named 'pyverbs'.*python3-pyverbs"):
        RdmaEndpoint(Secret.random())


def test_a_library_of_another_release_is_no_crash() -> None:
    """As the dynamic linker says it of a build for another libibverbs."""

    def imported(name: str) -> Any:
        if name == "pyverbs.device":
            raise ImportError("libibverbs.so.1: version `IBVERBS_PRIVATE_59' not found")
        return SimpleNamespace(name=name)

    with pytest.raises(TransportUnavailable, match=r"IBVERBS_PRIVATE_59.*python3-pyverbs"):
        load(imported)


@pytest.mark.parametrize("enums", ["pyverbs.enums", "pyverbs.libibverbs_enums"])
def test_constants_are_found_under_either_name(enums: str) -> None:
    verbs = load(pyverbs(enums))
    assert verbs.enums.name == enums
    assert verbs.qp.name == "pyverbs.qp"
    assert verbs.error is Refused


def test_a_kernel_without_verbs_is_not_a_machine_without_a_card() -> None:
    verbs = load(pyverbs("pyverbs.enums"))

    def refuse() -> list[Any]:
        raise Refused("Failed to get devices list")

    verbs.device.get_device_list = refuse
    with pytest.raises(TransportUnavailable, match=r"kernel offers no RDMA verbs.*ib_uverbs"):
        device_names(verbs)
    verbs.device.get_device_list = list
    with pytest.raises(TransportUnavailable, match=r"no RDMA device.*rdma link add"):
        device_names(verbs)
    verbs.device.get_device_list = lambda: [SimpleNamespace(name=b"mlx5_0")]
    assert device_names(verbs) == ["mlx5_0"]
