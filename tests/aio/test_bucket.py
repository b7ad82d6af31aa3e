"""No more passes than the bound says, and no less than it could."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop
from mcjax.types import NS_PER_S


def passed(per_s: float | None, burst: float, asks: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """`(time, amount)` of each, who ask after `(pause, amount)` one behind the other."""
    seen: list[tuple[int, int]] = []

    async def main() -> None:
        bucket = aio.TokenBucket(per_s, burst)
        for pause_ns, amount in asks:
            await aio.sleep_ns(pause_ns)
            await bucket.take(amount)
            seen.append((aio.now_ns(), amount))

    VirtualLoop().run(main)
    return seen


def test_each_waits_until_what_was_taken_before_is_paid_for() -> None:
    seen = passed(100.0, 0.0, [(0, 50), (0, 100), (0, 1), (NS_PER_S, 10)])
    assert [time / NS_PER_S for time, _ in seen] == [0.0, 0.5, 1.5, 2.5]


def test_after_a_pause_a_burst_passes_at_once() -> None:
    seen = passed(100.0, 100.0, [(NS_PER_S, 50), (0, 50), (0, 50), (0, 50)])
    assert [time / NS_PER_S for time, _ in seen] == [1.0, 1.0, 1.0, 1.5]


def test_without_a_bound_nobody_waits() -> None:
    assert [time for time, _ in passed(None, 0.0, [(0, 10**12)] * 3)] == [0, 0, 0]


@given(
    st.floats(1.0, 1e6),
    st.integers(0, 1000),
    st.lists(st.tuples(st.integers(0, NS_PER_S), st.integers(0, 1000)), min_size=1, max_size=20),
)
def test_in_no_time_more_passes_than_the_bound(per_s: float, burst: int, asks: list[tuple[int, int]]) -> None:
    seen = passed(per_s, burst, asks)
    for first in range(len(seen)):
        for last in range(first, len(seen)):
            seconds = (seen[last][0] - seen[first][0]) / NS_PER_S
            let_through = sum(amount for _, amount in seen[first:last])  # what came last is paid for by who comes next
            assert let_through <= per_s * seconds + burst + 1e-3 * per_s
