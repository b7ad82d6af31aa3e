"""Where NICs are, what rails follow, and how a config says it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcjax.cost.catalogue import hardware
from mcjax.errors import ConfigError
from mcjax.transfer.topology import Nic, Topology, read_topology

FOUR = tuple(Nic(f"nic{index}", index // 2, 25e9) for index in range(4))


@given(
    nics=st.integers(1, 8),
    numa_nodes=st.integers(1, 2),
    switches=st.sampled_from(["domain", "rail"]),
    source_numa=st.none() | st.integers(0, 1),
    target_numa=st.none() | st.integers(0, 1),
)
def test_every_pair_is_a_rail_and_those_that_are_no_spares_share_nothing(
    nics: int, numa_nodes: int, switches: str, source_numa: int | None, target_numa: int | None
) -> None:
    cards = tuple(Nic(f"nic{index}", index * numa_nodes // nics, 1e9) for index in range(nics))
    topology = Topology(cards, switches)  # pyright: ignore[reportArgumentType]
    rails = topology.rails("a", "b", source_numa, target_numa)
    assert len({(rail.local, rail.remote) for rail in rails}) == len(rails) == nics * nics
    first = [rail for rail in rails if not rail.spare]
    assert len({rail.local for rail in first}) == len({rail.remote for rail in first}) == len(first) == nics
    if switches == "rail":
        assert all(rail.crosses == (rail.local[2:] != rail.remote[2:]) for rail in rails)
    else:
        assert not any(rail.crosses for rail in rails)


def test_partners_are_equally_near_to_their_memories() -> None:
    rails = Topology(FOUR).rails("a", "b", source_numa=0, target_numa=1)
    pairs = {(rail.local, rail.remote): rail.distance for rail in rails if not rail.spare}
    assert pairs == {
        ("a/nic0", "b/nic2"): 0,
        ("a/nic1", "b/nic3"): 0,
        ("a/nic2", "b/nic0"): 2,
        ("a/nic3", "b/nic1"): 2,
    }


def test_between_domains_every_rail_crosses() -> None:
    topology = Topology(FOUR, domains={"a": "left", "b": "left", "c": "right"})
    assert not any(rail.crosses for rail in topology.rails("a", "b"))
    assert all(rail.crosses for rail in topology.rails("a", "c"))
    assert not any(rail.crosses for rail in topology.rails("x", "y")), "who is not named is together"


def test_the_catalogue_says_what_a_node_has_and_its_bandwidth_stays() -> None:
    for name, nics in (("a800x8", 4), ("h800x8", 8), ("cpu", 1)):
        machine = hardware(name)
        topology = read_topology("nics", machine)
        assert topology is not None
        assert len(topology.nics) == nics
        assert sum(nic.bytes_per_s for nic in topology.nics) == pytest.approx(machine.nic_bytes_per_s)
    assert read_topology(None, hardware("a800x8")) is None
    rails = read_topology("rails", hardware("a800x8"))
    assert rails is not None
    assert rails.switches == "rail"
    assert [nic.numa_node for nic in rails.nics] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("mesh", "transfer.topology"),
        (4, "transfer.topology"),
        ({"nics": 0}, "transfer.topology.nics"),
        ({"nics": True}, "transfer.topology.nics"),
        ({"nics": 2, "numa_nodes": 4}, "transfer.topology.numa_nodes"),
        ({"switches": "star"}, "transfer.topology.switches"),
        ({"domains": ["a"]}, "transfer.topology.domains"),
        ({"cards": 4}, "transfer.topology.cards"),
    ],
)
def test_what_is_no_topology_is_refused_by_name(value: object, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_topology(value, hardware("a800x8"))
    assert caught.value.key == key
