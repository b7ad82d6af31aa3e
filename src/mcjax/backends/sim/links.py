"""Links with fair sharing: how long bytes take when many flows cross the same PCIe switches and network cards.

Flows of one class over one set of links form a *path* and are served alike, so a path keeps one service clock (bytes
given to each of its flows so far) and its flows wait for the reading at which they are done. A flow that starts or ends
touches only the paths that share links with it, directly or through others; nothing else changes, not even by a
rounding. Most flows share with nobody from beginning to end: those need one timer, for the arrival, and are taken off
their links then, or when somebody else comes who would share them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from mcjax import aio
from mcjax.backends.sim.paths import NEVER_NS, Link, Path, fill


class Flow:
    """A flow in progress. It ends in one call of `on_arrival`, as its last byte arrives, unless it is cancelled."""

    __slots__ = ("_model", "nbytes", "on_arrival", "path", "timer")

    def __init__(self, model: LinkModel, nbytes: int, on_arrival: Callable[[Flow], object]):
        self._model = model
        self.nbytes = nbytes
        self.on_arrival: Callable[[Flow], object] | None = on_arrival
        """None once it has been called, or never will be."""
        self.path: Path | None = None
        """Where the flow is being served; None before and after (also while its last byte is under way)."""
        self.timer: aio.Timer | None = None
        """For the arrival, once that is known."""

    def cancel(self) -> None:
        """Give the flow up: others get its share from now on. Harmless when it has arrived."""
        if self.on_arrival is not None:
            self.on_arrival = None
            self._model.on_cancel(self)


class LinkModel:
    """Named links and the flows that cross them, in max-min fairness, for one run on one loop.

    A flow crosses all its links at once and takes the same rate on each. Rates are max-min fair by progressive filling:
    no flow could be given more without taking from one that has no more than it; n flows on one link get 1/n each.
    Between classes priority is strict: a class shares what the higher ones leave, and may get nothing for a while.
    A flow is served from the moment it starts; its latency (the sum over its links) is paid once, at the end, when it
    takes no share any more. Starts and ends are integer nanoseconds; an end is rounded up. Flows of links in common
    whose service ends in the same instant take their last way in the order in which they were started.
    """

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}
        self._paths: dict[tuple[tuple[str, ...], int], Path] = {}
        self._priorities: list[int] = []
        """Every class that a path has, the highest first."""
        self._clock: aio.Clock | None = None
        self._started = 0
        self._stamp = 0
        self._served: list[tuple[int, Flow, int]] = []

    def add(self, name: str, bytes_per_s: float, latency_ns: int = 0) -> None:
        """Make a link known. Raises `ValueError` for a name that is taken, no capacity or a negative latency."""
        if name in self._links:
            raise ValueError(f"link {name} exists already")
        if not (math.isfinite(bytes_per_s) and bytes_per_s > 0):
            raise ValueError(f"link {name}: {bytes_per_s} bytes/s; it must be positive and finite")
        if latency_ns < 0:
            raise ValueError(f"link {name}: latency of {latency_ns} ns; it must not be negative")
        self._links[name] = Link(float(bytes_per_s), latency_ns)

    @property
    def names(self) -> tuple[str, ...]:
        """Every link, in the order in which they were added."""
        return tuple(self._links)

    def start(
        self, nbytes: int, links: tuple[str, ...], on_arrival: Callable[[Flow], object], priority: int = 0
    ) -> Flow:
        """Send `nbytes` across all of `links` at once. Flows of a higher `priority` are served before any of a lower.

        A flow of no bytes arrives after the latency alone and takes no share. Raises `ValueError` for a negative size,
        an unknown link, a link named twice, or no links.
        """
        path = self._paths.get((links, priority)) or self._new_path(links, priority)
        if nbytes < 0:
            raise ValueError(f"a flow of {nbytes} bytes")
        clock = self._clock
        if clock is None:
            clock = self._clock = aio.clock()
        now_ns = clock.now_ns()
        flow = Flow(self, nbytes, on_arrival)
        if nbytes == 0:
            self._arrive_later(flow, now_ns + path.latency_ns, now_ns)
            return flow
        shared = False
        for link in path.links:
            if link.flows and self._meet(link, now_ns):
                shared = True
        self._started += 1
        flow.path = path
        flows = path.flows
        if not shared:
            path.service, path.since_ns, path.rate = 0.0, now_ns, path.bytes_per_s
            flows.append((float(nbytes), self._started, flow))
            for link in path.links:
                link.paths[path] = None
                link.flows = 1
            path.end_ns = path.next_end_ns()
            path.lone = flow
            flow.timer = clock.call_at_ns(path.end_ns + path.latency_ns, self._arrive, flow)
            return flow
        if not flows:
            path.service, path.since_ns, path.rate, path.end_ns = 0.0, now_ns, 0.0, NEVER_NS
            for link in path.links:
                link.paths[path] = None
        heapq.heappush(flows, (path.reading(now_ns) + nbytes, self._started, flow))
        for link in path.links:
            link.flows += 1
        self._refill(path.links[0], now_ns)
        if self._served:
            self._release(now_ns)
        return flow

    def load(self, link: str) -> tuple[int, int]:
        """Flows that are being served on `link` now, and the bytes they have left (rounded up)."""
        found = self._links[link]
        left = math.ceil(math.fsum(self._left_bytes(found)))
        return found.flows, left

    def carried_bytes(self, link: str) -> int:
        """Bytes that `link` has carried so far (rounded down), also for flows that were cancelled later."""
        found = self._links[link]
        left = math.ceil(math.fsum(self._left_bytes(found)))
        active = sum(flow.nbytes for path in found.paths for _, _, flow in path.flows)
        return found.ended_bytes + active - left

    def _left_bytes(self, link: Link) -> list[float]:
        if self._clock is None:
            return []
        now_ns = self._clock.now_ns()
        for path in link.paths:
            if path.lone is not None and path.end_ns <= now_ns:
                self._leave_lone(path)
                return []
        readings = [(path, path.reading(now_ns)) for path in link.paths]
        return [max(0.0, done - reading) for path, reading in readings for done, _, _ in path.flows]

    def _new_path(self, links: tuple[str, ...], priority: int) -> Path:
        unknown = [name for name in links if name not in self._links]
        if unknown or not links or len(dict.fromkeys(links)) < len(links):
            problem = f"no link {unknown[0]}" if unknown else "a flow crosses one link or more, each once"
            raise ValueError(f"route {links}: {problem}")
        if priority not in self._priorities:
            self._priorities = sorted([*self._priorities, priority], reverse=True)
        path = self._paths[links, priority] = Path(tuple(self._links[name] for name in links), priority)
        return path

    # A flow that is alone

    def _meet(self, link: Link, now_ns: int) -> bool:
        """Another flow is about to cross `link`. False if it finds nobody there after all: who was alone is served."""
        if len(link.paths) > 1:
            return True
        (path,) = link.paths
        flow = path.lone
        if flow is None:
            return True
        if path.end_ns <= now_ns:
            self._leave_lone(path)
            return False
        path.lone = None
        assert flow.timer is not None
        flow.timer.cancel()
        flow.timer = None
        return True

    def _leave_lone(self, path: Path) -> None:
        """The lone flow of `path` has been served: it leaves its links, and its arrival stays as it is."""
        _, _, flow = path.flows.pop()
        path.lone = None
        self._leave(path, flow, flow.nbytes)

    def _arrive(self, flow: Flow) -> None:
        if flow.path is not None:
            self._leave_lone(flow.path)  # it was alone to the end, and nobody has come since
        flow.timer = None  # it names the flow: kept, the two would be garbage that only the collector finds
        on_arrival = flow.on_arrival
        if on_arrival is not None:
            flow.on_arrival = None
            on_arrival(flow)

    # Flows that share

    def _on_timer(self, path: Path) -> None:
        """The first flow of `path` is served."""
        assert self._clock is not None
        now_ns = self._clock.now_ns()
        path.timer = None
        self._take_served(path, now_ns)
        self._regroup(path.links, now_ns)
        self._release(now_ns)

    def on_cancel(self, flow: Flow) -> None:
        """`flow` was given up (cancelling it calls this): others get its share from now on."""
        if flow.timer is not None:
            flow.timer.cancel()
        path = flow.path
        if path is None:
            return
        assert self._clock is not None
        now_ns = self._clock.now_ns()
        path.lone = None
        reading = path.reading(now_ns)
        entry = next(entry for entry in path.flows if entry[2] is flow)
        path.flows.remove(entry)
        heapq.heapify(path.flows)
        path.drop_timer()
        self._leave(path, flow, flow.nbytes - math.ceil(max(0.0, entry[0] - reading)))
        self._regroup(path.links, now_ns)
        self._release(now_ns)

    def _leave(self, path: Path, flow: Flow, served_bytes: int) -> None:
        flow.path = None
        for link in path.links:
            link.flows -= 1
            link.ended_bytes += served_bytes
            if not path.flows:
                del link.paths[path]

    def _take_served(self, path: Path, now_ns: int) -> None:
        """Move every flow of `path` that is done by now to `_served`."""
        flows = path.flows
        path.end_ns = path.next_end_ns()
        while path.end_ns <= now_ns:
            _, order, flow = heapq.heappop(flows)
            self._served.append((order, flow, now_ns + path.latency_ns))
            self._leave(path, flow, flow.nbytes)
            path.end_ns = path.next_end_ns() if flows else NEVER_NS

    def _release(self, now_ns: int) -> None:
        """What was served in this instant goes its last way, in order of start."""
        served = self._served
        if len(served) > 1:
            served.sort(key=lambda entry: entry[0])
        for _, flow, arrival_ns in served:
            self._arrive_later(flow, arrival_ns, now_ns)
        served.clear()

    def _arrive_later(self, flow: Flow, arrival_ns: int, now_ns: int) -> None:
        assert self._clock is not None
        if arrival_ns == now_ns:
            self._clock.call_soon(self._arrive, flow)
        else:
            flow.timer = self._clock.call_at_ns(arrival_ns, self._arrive, flow)

    def _regroup(self, links: Sequence[Link], now_ns: int) -> None:
        """Refill each of the groups that `links`, which were in one, now belong to."""
        before = self._stamp
        for link in links:
            if link.flows and link.stamp <= before:
                self._refill(link, now_ns)

    def _refill(self, first: Link, now_ns: int) -> None:
        """Set rates and the next end's timer anew for all paths that share links with `first`, directly or not."""
        assert self._clock is not None
        if len(first.paths) == 1:
            (path,) = first.paths
            count = len(path.flows)
            if all(link.flows == count for link in path.links) and path.end_ns > now_ns:
                self._stamp += 1
                for link in path.links:
                    link.stamp = self._stamp
                path.set_rate(path.bytes_per_s / count, now_ns)
                path.end_ns = path.next_end_ns()
                if count == 1:
                    path.drop_timer()
                    path.lone = flow = path.flows[0][2]
                    flow.timer = self._clock.call_at_ns(path.end_ns + path.latency_ns, self._arrive, flow)
                else:
                    path.set_timer(self._clock, self._on_timer)
                return
        links, paths = self._group(first)
        due = [path for path in paths if path.end_ns <= now_ns]
        if due:
            # They end in this very instant, only their timer is not up yet; without them the group may fall apart.
            for path in due:
                path.drop_timer()
                self._take_served(path, now_ns)
            self._regroup(links, now_ns)
            return
        fill(links, paths, self._priorities, self._stamp, now_ns)
        next_path = paths[0]
        for path in paths:
            path.end_ns = path.next_end_ns()
            if path.end_ns < next_path.end_ns:
                next_path = path
        # One timer a group: when it comes up, or a flow joins or leaves, the whole group is looked at again.
        for path in paths:
            if path.timer is not None and path is not next_path:
                path.drop_timer()
        next_path.set_timer(self._clock, self._on_timer)

    def _group(self, first: Link) -> tuple[list[Link], list[Path]]:
        self._stamp += 1
        stamp = self._stamp
        first.stamp = stamp
        links = [first]
        paths: list[Path] = []
        for link in links:  # grows as paths lead to further links
            link.left = link.bytes_per_s
            link.unfilled = link.flows
            for path in link.paths:
                if path.stamp != stamp:
                    path.stamp = stamp
                    paths.append(path)
                    for other in path.links:
                        if other.stamp != stamp:
                            other.stamp = stamp
                            links.append(other)
        return links, paths
