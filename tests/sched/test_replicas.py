"""Choices of sites for replicas."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mcjax.sched.replicas import Site, elsewhere, least_loaded, surplus

sites = st.lists(
    st.builds(Site, st.sampled_from("abcdefgh"), st.sampled_from("xyz"), st.integers(0, 9), st.integers(0, 9)),
    unique_by=lambda site: site.node,
)


def test_the_most_room_in_a_further_domain() -> None:
    here = [Site("a", "x", 9)]
    found = [Site("b", "x", 9), Site("c", "y", 3), Site("d", "z", 5), Site("e", "y", 5)]
    assert [site.node for site in elsewhere(here, found)] == ["d", "e", "c"]
    assert elsewhere([*here, found[1], found[2], found[3]], found) == []


def test_the_shortest_queue_is_read_from_and_the_first_of_equal_ones() -> None:
    assert least_loaded([Site("a", "x", 0, 5), Site("b", "y", 0, 2), Site("c", "z", 0, 2)]) == Site("b", "y", 0, 2)
    assert least_loaded([]) is None


def test_what_is_too_many_goes_where_room_is_scarce() -> None:
    held = [Site("a", "x", 1), Site("b", "y", 9), Site("c", "z", 1)]
    assert [site.node for site in surplus(held, 2)] == ["c"]
    assert [site.node for site in surplus(held, 1)] == ["a", "c"]
    assert surplus(held, 3) == []
    held = [Site("a", "x", 9, made=True), Site("b", "y", 1), Site("c", "z", 8, made=True)]
    assert [site.node for site in surplus(held, 2)] == ["c"]


@given(sites, sites, st.integers(0, 9))
def test_never_twice_in_a_domain_and_never_fewer_than_wanted(
    holders: list[Site], found: list[Site], copies: int
) -> None:
    domains = [site.domain for site in holders]
    assert all(site in found and site.domain not in domains for site in elsewhere(holders, found))
    assert len(holders) - len(surplus(holders, copies)) == min(len(holders), copies)
    best = least_loaded(holders)
    assert all(best is not None and best.outgoing_bytes <= site.outgoing_bytes for site in holders)
