"""Rows of `events.parquet` as slices and instants, each where it happened, and tied to those that it came of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mcjax.engine.cluster_spec import node_of
from mcjax.track.perfetto.flows import Flows, Location, submitted
from mcjax.track.perfetto.packets import Value
from mcjax.track.perfetto.tracks import Path, Tracks
from mcjax.track.steps import STEP_KINDS
from mcjax.types import RequestState, Role, Tier


class Event(NamedTuple):
    """A row, its cells in the order of the table's columns."""

    time_ns: int
    start_ns: int
    kind: str
    request_id: int
    place: str
    tier: str
    first_block: str
    blocks: int
    tokens: int
    bytes: int
    detail: str


COPIES = ("transfer", "transfer_failed")
ENDS = tuple(str(state) for state in RequestState)
HOLDING: dict[str, str] = {Role.PREFILL: "sending", Role.DECODE: "decoding", Role.MIXED: "decoding"}
"""What a request's pages are kept for at an instance, when its prompt is there."""


class EventTracks:
    """Writes events; `roles` are those of the instances, by name."""

    def __init__(self, tracks: Tracks, roles: Mapping[str, str]):
        self._tracks = tracks
        self._roles = roles
        self._instance_at = {node_of(name): name for name in roles}
        self._flows = Flows()
        for name in roles:
            tracks.group(self.instance(name))

    def write(self, event: Event) -> None:
        """Call with a run's rows in their order."""
        if event.kind in STEP_KINDS:
            self._step(event)
        elif event.kind in COPIES:
            self._copy(event)
        elif event.kind == "release":
            self._released(event)
        elif event.place == "frontend":
            self._passed(event)
        else:
            self._tracks.instant(self._place(event), event.kind, event.time_ns, event.kind, self._arguments(event))

    def _step(self, event: Event) -> None:
        arguments, flows = self._arguments(event), list[int]()
        if event.request_id < 0:
            arguments["sequences"] = arguments.pop("blocks", 0)
            name, kind = f"decode of {event.blocks}", "decode steps"
        else:
            name, kind = _request(event), "prefill chunks"
            at = Location(node_of(event.place), Tier.HBM)
            flows = self._flows.computed(event.request_id, at, event.start_ns, event.time_ns)
        path = (*self.instance(event.place), kind)
        self._tracks.span(path, name, event.start_ns, event.time_ns, event.kind, arguments, flows)

    def _copy(self, event: Event) -> None:
        (source, target), tiers = event.place.split(">"), event.tier.split(">")
        flows: list[int] = []
        if event.kind == "transfer" and event.request_id >= 0:
            ends = Location(source, tiers[0]), Location(target, tiers[-1])
            flows = self._flows.moved(event.request_id, *ends, event.start_ns, event.time_ns)
        way = f"{source} {event.tier}" if source == target else f"{source} > {target}"
        path = ("links", event.detail.split(":")[0], way)
        self._tracks.span(
            path, _request(event), event.start_ns, event.time_ns, event.kind, self._arguments(event), flows
        )

    def _released(self, event: Event) -> None:
        at = Location(event.place, event.tier)
        instance = self._instance_at.get(event.place, event.place)
        start_ns, flows = self._flows.held(event.request_id, at, event.start_ns, event.time_ns)
        path = (*self.instance(instance), HOLDING.get(self._roles.get(instance, ""), "decoding"))
        self._tracks.span(path, _request(event), start_ns, event.time_ns, event.kind, self._arguments(event), flows)

    def _passed(self, event: Event) -> None:
        """A request comes to the frontend, or has ended."""
        flows: list[int] = []
        if event.kind == "submit":
            flows = submitted(event.request_id)
        elif event.kind in ENDS:
            flows = self._flows.end(event.request_id)
        name = f"{event.kind} {event.request_id}"
        self._tracks.instant(("frontend",), name, event.time_ns, event.kind, self._arguments(event), flows)

    def instance(self, name: str) -> Path:
        """Where an instance's tracks are."""
        role = self._roles.get(name)
        return ("instances", f"{name} ({role})" if role else name)

    def _place(self, event: Event) -> Path:
        if event.tier:
            return ("tiers", f"{event.place} {event.tier}", "blocks")
        return (*self.instance(event.place), "log") if event.place in self._roles else (event.place,)

    def _arguments(self, event: Event) -> dict[str, Value]:
        """What a row says; cells that say nothing are left out."""
        of_instance = event.kind in STEP_KINDS or event.place in self._roles
        node = node_of(event.place) if of_instance else event.place if event.tier else ""
        given: dict[str, Value] = {
            "first_block": event.first_block,
            "blocks": event.blocks,
            "place": event.place,
            "node": node,
            "tier": event.tier,
            "tokens": event.tokens,
            "bytes": event.bytes,
            "detail": event.detail,
        }
        told = {name: value for name, value in given.items() if value not in ("", 0)}
        return told if event.request_id < 0 else {"request_id": event.request_id, **told}


def _request(event: Event) -> str:
    return f"request {event.request_id}" if event.request_id >= 0 else event.kind
