"""Fair sharing on links: answers worked out by hand, an exact model to compare with, and what must never happen."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax import aio
from mcjax.backends.sim.links import LinkModel
from mcjax.backends.virtual import VirtualLoop
from mcjax.types import NS_PER_S

GB = 1_000_000_000


@dataclass(frozen=True)
class Sent:
    """A flow to start, and when to give it up (never, if None)."""

    start_ns: int
    nbytes: int
    links: tuple[str, ...]
    cancel_ns: int | None = None
    priority: int = 0


def model_of(links: dict[str, tuple[int, int]]) -> LinkModel:
    model = LinkModel()
    for name, (bytes_per_s, latency_ns) in links.items():
        model.add(name, bytes_per_s, latency_ns)
    return model


def send(model: LinkModel, nbytes: int, links: tuple[str, ...], priority: int = 0) -> asyncio.Future[int]:
    """Start a flow; the future is the time when it arrives. Cancelling the future cancels the flow."""
    arrival: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    flow = model.start(nbytes, links, lambda _: arrival.set_result(aio.now_ns()), priority)
    arrival.add_done_callback(lambda _: flow.cancel() if arrival.cancelled() else None)
    return arrival


def ends_of(links: dict[str, tuple[int, int]], sent: list[Sent], idle_timers: tuple[int, ...] = ()) -> list[int | None]:
    """When each flow ends (None: cancelled), all on one model; `idle_timers` are wake-ups that do nothing."""

    async def main() -> list[int | None]:
        model = model_of(links)
        clock = aio.clock()
        ends: list[int | None] = [None] * len(sent)
        for when_ns in idle_timers:
            clock.call_at_ns(when_ns, lambda: [model.load(name) for name in model.names])

        async def follow(index: int, one: Sent) -> None:
            await aio.sleep_until_ns(one.start_ns)
            arrival = send(model, one.nbytes, one.links, one.priority)
            if one.cancel_ns is not None:
                clock.call_at_ns(one.cancel_ns, arrival.cancel)
            try:
                ends[index] = await arrival
            except asyncio.CancelledError:
                assert arrival.cancelled()

        tasks = [aio.spawn(follow(index, one), f"flow {index}") for index, one in enumerate(sent)]
        for task in tasks:
            await task
        for name in model.names:
            assert model.load(name) == (0, 0)
            if all(one.cancel_ns is None for one in sent):
                assert model.carried_bytes(name) == sum(one.nbytes for one in sent if name in one.links)
        return ends

    return VirtualLoop().run(main)


# By hand. One GB/s is one byte a nanosecond.


@pytest.mark.parametrize("count", [1, 2, 3, 7, 29, 30])
def test_equal_flows_share_one_link_exactly(count: int) -> None:
    ends = ends_of({"a": (GB, 0)}, [Sent(5, 1_000, ("a",))] * count)
    assert ends == [5 + 1_000 * count] * count


def test_equal_flows_share_the_senders_card_whatever_their_receivers() -> None:
    links = {"out:s": (GB, 2), **{f"in:{k}": (GB, 3) for k in range(4)}}
    ends = ends_of(links, [Sent(0, 500, ("out:s", f"in:{k % 4}")) for k in range(8)])
    assert ends == [500 * 8 + 5] * 8


def test_staggered_joins() -> None:
    # a alone: 100 bytes by 100. a and b: 100 each by 300. a, b and c: 100 each by 600, when a (300) ends; b has 200 of
    # 400 and c 100 of 200: at a half each, c has its last 100 by 800; then b alone, its last 100 by 900.
    sent = [Sent(0, 300, ("a",)), Sent(100, 400, ("a",)), Sent(300, 200, ("a",))]
    assert ends_of({"a": (GB, 0)}, sent) == [600, 900, 800]


def test_rounding_inside_costs_no_nanosecond() -> None:
    # A busy link loses nothing: the last of six ends when all 360 bytes have gone, though rates were 1/3, 1/5 and 1/6.
    sent = [Sent(10 * k, 60, ("a",)) for k in range(6)]
    assert ends_of({"a": (GB, 0)}, sent) == [273, 323, 343, 353, 358, 360] == exact_ends({"a": (GB, 0)}, sent)


def test_ends_are_rounded_up() -> None:
    assert ends_of({"a": (3 * GB, 0)}, [Sent(0, 100, ("a",))]) == [34]
    assert ends_of({"a": (3 * GB, 0)}, [Sent(0, 99, ("a",))]) == [33]


def test_latency_is_paid_once_and_takes_no_share() -> None:
    # The first is served by 100 and then only on its way: the second, which starts at 100, has the link to itself.
    sent = [Sent(0, 100, ("a", "b")), Sent(100, 100, ("a", "b"))]
    assert ends_of({"a": (GB, 40), "b": (2 * GB, 2)}, sent) == [142, 242]


def test_no_bytes_take_the_latency_alone() -> None:
    sent = [Sent(7, 0, ("a", "b")), Sent(7, 100, ("a",)), Sent(8, 0, ("b",))]
    assert ends_of({"a": (GB, 40), "b": (GB, 0)}, sent) == [47, 147, 8]


def test_two_bottlenecks() -> None:
    # Three flows want x (3 GB/s); two of them also y (1 GB/s): those get 0.5, the third gets the other 2.
    links = {"x": (3 * GB, 0), "y": (GB, 0)}
    sent = [Sent(0, 500, ("x", "y")), Sent(0, 500, ("y", "x")), Sent(0, 2_000, ("x",))]
    assert ends_of(links, sent) == [1_000, 1_000, 1_000]


def test_who_is_held_up_elsewhere_leaves_the_rest_to_others() -> None:
    # On x (6): p (x, y) is held to 1 by y, q (x, z) to 2 by z, so r gets 3. At 100 r is done; p and q keep their rates.
    links = {"x": (6 * GB, 0), "y": (GB, 0), "z": (2 * GB, 0)}
    sent = [Sent(0, 200, ("x", "y")), Sent(0, 400, ("x", "z")), Sent(0, 300, ("x",))]
    assert ends_of(links, sent) == [200, 200, 100]


def test_end_of_a_bridge_lets_both_sides_go_on_alone() -> None:
    # b crosses x and y and halves both until it has had 100, at 200; a and c have 100 of 300 each by then.
    sent = [Sent(0, 300, ("x",)), Sent(0, 100, ("x", "y")), Sent(0, 300, ("y",))]
    assert ends_of({"x": (GB, 0), "y": (GB, 0)}, sent) == [400, 200, 400]


def test_cancel_gives_the_share_back() -> None:
    # Each has 50 when the second is given up, at 100; the first needs 150 more, alone.
    sent = [Sent(0, 200, ("a",)), Sent(0, 200, ("a",), cancel_ns=100)]
    assert ends_of({"a": (GB, 0)}, sent) == [250, None]


def test_cancelling_the_waiting_task_gives_the_share_back() -> None:
    async def main() -> int:
        model = model_of({"a": (GB, 0)})

        async def wait() -> None:
            await send(model, 1_000, ("a",))

        waiting = aio.spawn(wait(), "waiting")
        flow = send(model, 200, ("a",))
        await aio.sleep_ns(100)
        await aio.settle(waiting)
        assert model.load("a") == (1, 150)
        assert model.carried_bytes("a") == 100
        return await flow

    assert VirtualLoop().run(main) == 250


def test_cancel_while_only_latency_is_left() -> None:
    assert ends_of({"a": (GB, 50)}, [Sent(0, 10, ("a",), cancel_ns=30), Sent(0, 10, ("a",))]) == [None, 70]


def test_load_and_carried_bytes_in_mid_flight() -> None:
    async def main() -> None:
        model = model_of({"a": (GB, 0), "b": (GB, 0)})
        first, second = send(model, 300, ("a",)), send(model, 500, ("a", "b"))
        await aio.sleep_ns(101)
        assert model.load("a") == (2, 800 - 101)
        assert model.load("b") == (1, 450)  # 449.5, rounded up
        assert (model.carried_bytes("a"), model.carried_bytes("b")) == (101, 50)
        assert [await first, await second] == [600, 800]
        assert (model.carried_bytes("a"), model.carried_bytes("b")) == (800, 500)

    VirtualLoop().run(main)


def test_same_instant_resolves_in_order_of_start() -> None:
    async def main() -> list[int]:
        model = model_of({f"in:{k}": (GB, 1) for k in range(5)} | {"out": (5 * GB, 1)})
        order: list[int] = []
        for index in range(10):
            model.start(1_000, ("out", f"in:{(index * 3) % 5}"), lambda _, index=index: order.append(index))
        await aio.sleep_ns(2_001)
        assert order == []
        await aio.sleep_ns(1)
        return order

    assert VirtualLoop().run(main) == list(range(10))


def test_who_is_alone_to_the_end_leaves_its_links_in_time() -> None:
    # The first is served by 100 and arrives at 150. At 120 somebody finds the link empty, at 140 finds a flow on it.
    sent = [Sent(0, 100, ("a",)), Sent(120, 40, ("a",)), Sent(140, 60, ("a",))]
    assert ends_of({"a": (GB, 50)}, sent) == [150, 230, 270]


def test_a_lone_flow_is_on_its_link_only_while_it_is_served() -> None:
    async def main() -> None:
        model = model_of({"a": (GB, 50)})
        arrival = send(model, 100, ("a",))
        await aio.sleep_ns(60)
        assert (model.load("a"), model.carried_bytes("a")) == ((1, 40), 60)
        await aio.sleep_ns(60)
        assert (model.load("a"), model.carried_bytes("a")) == ((0, 0), 100)
        assert await arrival == 150
        assert model.carried_bytes("a") == 100

    VirtualLoop().run(main)


def test_a_lone_flow_given_up_on_its_last_way_has_been_carried() -> None:
    async def main() -> None:
        model = model_of({"a": (GB, 50)})
        arrival = send(model, 100, ("a",))
        await aio.sleep_ns(120)
        arrival.cancel()
        await aio.sleep_ns(1)
        assert (model.load("a"), model.carried_bytes("a")) == ((0, 0), 100)

    VirtualLoop().run(main)


# By hand, with classes.


@pytest.mark.parametrize("count", [1, 2, 3, 7, 29])
def test_a_higher_class_goes_first_and_equals_share_within_theirs(count: int) -> None:
    sent = [Sent(5, 1_000, ("a",), priority=k % 2) for k in range(2 * count)]
    assert ends_of({"a": (GB, 0)}, sent) == [5 + 2_000 * count, 5 + 1_000 * count] * count


def test_a_higher_class_takes_the_link_and_gives_it_back() -> None:
    # Two low flows have 50 each when the high one comes (100); it is alone until 300; they need 150 more each.
    sent = [Sent(0, 200, ("a",)), Sent(0, 200, ("a",)), Sent(100, 200, ("a",), priority=1)]
    assert ends_of({"a": (GB, 0)}, sent) == [600, 600, 300]


def test_a_lone_flow_stands_still_while_a_higher_class_is_served() -> None:
    sent = [Sent(0, 300, ("a",)), Sent(100, 200, ("a",), priority=2), Sent(150, 100, ("a",), priority=5)]
    assert ends_of({"a": (GB, 7)}, sent) == [607, 407, 257]


def test_staggered_joins_within_a_lower_class() -> None:
    # high until 100. low a alone to 200 (100 of 300), then with b at a half each: b's 100 by 400, a's last 100 by 500.
    sent = [Sent(0, 100, ("a",), priority=1), Sent(0, 300, ("a",)), Sent(200, 100, ("a",))]
    assert ends_of({"a": (GB, 0)}, sent) == [100, 500, 400]


def test_a_lower_class_gets_what_a_higher_one_cannot_use() -> None:
    # On x (3): high p is held to 1 by y, so low q has 2 until p is done at 100, then 3.
    links = {"x": (3 * GB, 0), "y": (GB, 0)}
    sent = [Sent(0, 100, ("x", "y"), priority=1), Sent(0, 500, ("x",))]
    assert ends_of(links, sent) == [100, 200]


def test_a_starved_flow_leaves_its_other_links_to_its_equals() -> None:
    # Low q (x, y) gets nothing on x while high p is there, so low r has all of y; from 200 on q has x and y to itself.
    links = {"x": (GB, 0), "y": (GB, 0)}
    sent = [Sent(0, 200, ("x",), priority=1), Sent(0, 100, ("x", "y")), Sent(0, 200, ("y",))]
    assert ends_of(links, sent) == [200, 300, 200]


def test_cancelling_a_higher_flow_lets_the_lower_go_on() -> None:
    sent = [Sent(0, 100, ("a",)), Sent(0, 1_000, ("a",), cancel_ns=70, priority=1)]
    assert ends_of({"a": (GB, 0)}, sent) == [170, None]


def test_mistakes_are_refused() -> None:
    async def main() -> None:
        model = model_of({"a": (GB, 0)})
        for links in ((), ("a", "a"), ("a", "nowhere")):
            with pytest.raises(ValueError, match="route"):
                model.start(1, links, print)
        with pytest.raises(ValueError, match="-1 bytes"):
            model.start(-1, ("a",), print)
        with pytest.raises(ValueError, match="exists already"):
            model.add("a", GB)
        with pytest.raises(ValueError, match="positive"):
            model.add("b", 0)
        with pytest.raises(ValueError, match="latency"):
            model.add("b", GB, -1)

    VirtualLoop().run(main)


# For all flows.

LINKS = {"a": (GB, 3), "b": (2 * GB, 0), "c": (700_000_007, 11), "d": (GB, 0), "e": (5 * GB, 2)}
SENT = st.builds(
    Sent,
    start_ns=st.integers(0, 3_000),
    nbytes=st.integers(0, 5_000),
    links=st.lists(st.sampled_from(sorted(LINKS)), min_size=1, max_size=3, unique=True).map(tuple),
    cancel_ns=st.none() | st.integers(3_000, 9_000),
)
ONE_CLASS = st.lists(SENT, min_size=1, max_size=12)
CLASSES = st.lists(st.builds(replace, SENT, priority=st.integers(-1, 2)), min_size=1, max_size=12)
FLOWS = ONE_CLASS | CLASSES


def exact_ends(links: dict[str, tuple[int, int]], sent: list[Sent]) -> list[int | None]:
    """The same model the plain way: fractions, and every rate anew at every start and end."""
    left: dict[int, Fraction] = {}
    served: dict[int, int] = {}
    rate: dict[int, Fraction] = {}
    now_ns = 0
    while True:
        done_ns = {i: now_ns + max(0, math.ceil(left[i] / rate[i] - Fraction(1, 1024))) for i in left if rate[i]}
        starts = {i: one.start_ns for i, one in enumerate(sent) if i not in left and i not in served and one.nbytes}
        gone = {i: cancel_ns for i in left if (cancel_ns := sent[i].cancel_ns) is not None}
        times = [*done_ns.values(), *starts.values(), *gone.values()]
        if not times:
            break
        then_ns = min(times)
        for i in left:
            left[i] -= rate[i] * (then_ns - now_ns)
        now_ns = then_ns
        for i in [i for i in left if done_ns.get(i) == now_ns or gone.get(i) == now_ns]:
            served[i] = now_ns if done_ns.get(i) == now_ns else 1 << 60
            del left[i]
        left |= {i: Fraction(sent[i].nbytes) for i, start_ns in starts.items() if start_ns == now_ns}
        rate = exact_rates(links, {i: sent[i] for i in left})
    ends: list[int | None] = []
    for i, one in enumerate(sent):
        end_ns = served.get(i, one.start_ns) + sum(links[name][1] for name in one.links)
        ends.append(None if one.cancel_ns is not None and one.cancel_ns < end_ns else end_ns)
    return ends


def exact_rates(links: dict[str, tuple[int, int]], crossing: dict[int, Sent]) -> dict[int, Fraction]:
    room = {name: Fraction(capacity, NS_PER_S) for name, (capacity, _) in links.items()}
    rates: dict[int, Fraction] = {}
    for priority in sorted({one.priority for one in crossing.values()}, reverse=True):
        todo = [i for i, one in crossing.items() if one.priority == priority]
        while todo:
            users = {name: [i for i in todo if name in crossing[i].links] for name in links}
            tightest = min((name for name in links if users[name]), key=lambda name: room[name] / len(users[name]))
            share = room[tightest] / len(users[tightest])
            for i in users[tightest]:
                rates[i] = share
                for name in crossing[i].links:
                    room[name] -= share
            todo = [i for i in todo if i not in rates]
    return rates


@settings(max_examples=400, deadline=None)
@given(FLOWS)
def test_agrees_with_exact_progressive_filling(sent: list[Sent]) -> None:
    found, exact = ends_of(LINKS, sent), exact_ends(LINKS, sent)
    for one, end_ns, exact_ns in zip(sent, found, exact, strict=True):
        if end_ns is None or exact_ns is None:
            # Given up in the very instant it would have arrived: the order of the two is not what is tested here.
            assert end_ns == exact_ns or one.cancel_ns in (end_ns, exact_ns)
        else:
            assert abs(end_ns - exact_ns) <= 1


@settings(max_examples=60, deadline=None)
@given(FLOWS, st.lists(st.integers(0, 20_000), max_size=30))
def test_wake_ups_and_reports_that_do_nothing_change_nothing(sent: list[Sent], timers: list[int]) -> None:
    assert ends_of(LINKS, sent) == ends_of(LINKS, sent, tuple(timers))


@settings(max_examples=60, deadline=None)
@given(FLOWS, FLOWS)
def test_traffic_elsewhere_changes_no_end(sent: list[Sent], others: list[Sent]) -> None:
    elsewhere = [replace(one, links=tuple(f"far {name}" for name in one.links)) for one in others]
    links = LINKS | {f"far {name}": value for name, value in LINKS.items()}
    mixed = [(2 * i, one) for i, one in enumerate(sent)] + [(2 * i + 1, one) for i, one in enumerate(elsewhere)]
    mixed.sort(key=lambda placed: placed[0])
    ends = dict(zip([place for place, _ in mixed], ends_of(links, [one for _, one in mixed]), strict=True))
    assert [ends[2 * i] for i in range(len(sent))] == ends_of(LINKS, sent)


@settings(max_examples=60, deadline=None)
@given(FLOWS)
def test_no_flow_beats_its_links_and_none_hangs(sent: list[Sent]) -> None:
    for one, end_ns in zip(sent, ends_of(LINKS, sent), strict=True):
        if end_ns is None:
            assert one.cancel_ns is not None
            continue
        latency_ns = sum(LINKS[name][1] for name in one.links)
        slowest = min(LINKS[name][0] for name in one.links)
        assert end_ns >= one.start_ns + latency_ns + Fraction(one.nbytes * NS_PER_S, slowest) - Fraction(1, 512)


@settings(max_examples=60, deadline=None)
@given(FLOWS)
def test_no_link_carries_more_than_it_can(sent: list[Sent]) -> None:
    async def main() -> None:
        model = model_of(LINKS)
        for one in sorted(sent, key=lambda one: one.start_ns):
            await aio.sleep_until_ns(one.start_ns)
            send(model, one.nbytes, one.links, one.priority)
        last = {name: (aio.now_ns(), model.carried_bytes(name)) for name in model.names}
        while any(model.load(name)[0] for name in model.names):
            await aio.sleep_ns(173)
            for name in model.names:
                then_ns, before = last[name]
                last[name] = (aio.now_ns(), model.carried_bytes(name))
                room = LINKS[name][0] * (aio.now_ns() - then_ns) / NS_PER_S
                flows = sum(name in one.links for one in sent)
                # Bytes are reported whole, and an end is forgiven a thousandth of a nanosecond.
                assert 0 <= last[name][1] - before <= room + 1 + 0.01 * flows
                done, pending = model.carried_bytes(name), model.load(name)[1]
                assert done + pending == sum(one.nbytes for one in sent if name in one.links)

    VirtualLoop().run(main)
