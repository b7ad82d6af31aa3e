"""Deciding again from the journal: `reports.parquet` holds every input of the cluster state, in order.

A strategy that is a pure function of request, view and generator must choose the same again. Nothing else of the run is
needed, so this also tells what another strategy would have chosen at each moment of the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from mcjax.cost.base import CostModel
from mcjax.errors import InstanceDown, Rejected
from mcjax.sched.base import NOWHERE, Stage
from mcjax.sched.job import Placement
from mcjax.sched.placement import Strategies, admit, locate, place
from mcjax.sched.reports import Report
from mcjax.sched.state import ClusterState, LinkEstimate
from mcjax.types import SLO, Decision, NullRecorder, Request, Role, Tier

Row = Mapping[str, Any]

DECIDED = ("prefill", "decode", "fetch")


@dataclass(frozen=True, slots=True)
class Redecided:
    """One decision, as logged and as decided again (None: not made again, or not logged)."""

    request_id: int
    stage: str
    logged: tuple[Any, ...] | None
    again: tuple[Any, ...] | None

    @property
    def agrees(self) -> bool:
        return self.logged == self.again

    def __str__(self) -> str:
        return f"request {self.request_id}, {self.stage}: logged {self.logged}, decided again {self.again}"


class _Capture(NullRecorder):
    """Keeps the decisions that are made while it listens."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []

    def decision(self, decision: Decision) -> Decision:
        self.decisions.append(decision)
        return decision

    def take(self) -> list[Decision]:
        taken, self.decisions = self.decisions, []
        return taken


class Journal:
    """Rebuilds the conductor's cluster state and decides again with `strategies`."""

    def __init__(
        self,
        strategies: Strategies,
        cost: CostModel,
        link: LinkEstimate,
        bytes_per_token: int,
        block_tokens: int,
        rng: np.random.Generator,
        ssd: LinkEstimate | None = None,
    ):
        self._strategies = strategies
        self._rng = rng
        self._state = ClusterState(cost, link, bytes_per_token, block_tokens, ssd)
        self._requests: dict[int, tuple[Request, tuple[int, ...], SLO]] = {}
        self._placements: dict[int, Placement] = {}
        self._capture = _Capture()

    def walk(self, requests: Sequence[Row], reports: Sequence[Row], decisions: Sequence[Row]) -> Iterator[Redecided]:
        """Go through the journal; yields every decision that the conductor made, beside the same one made again."""
        self._requests = {row["request_id"]: _request(row) for row in requests}
        logged = iter([row for row in decisions if row["stage"] in DECIDED or row["stage"].startswith("admission")])
        for row in reports:
            if row["source"] != "conductor":
                self._state.fold(Report(row["tick_ns"], row["source"], row["kind"], row["values"]))
                continue
            self._apply(row["kind"].split(), row["values"], row["time_ns"])
            for again in self._capture.take():
                yield _pair(next(logged, None), again)
        for row in logged:
            yield Redecided(row["request_id"], row["stage"], _outcome(row), None)

    def _apply(self, words: Sequence[str], values: Sequence[int], now_ns: int) -> None:
        state, kind = self._state, words[0]
        if kind == "join":
            state.join(words[1], words[2], Role(words[3]), values[0])
        elif kind == "drain":
            state.drain(words[1])
        elif kind == "leave":
            state.leave(words[1])
        elif kind == "assign":
            request_id, prefill, decode, prefill_ns, context_tokens = values
            state.assign(request_id, prefill, decode, prefill_ns, context_tokens, self._requests[request_id][1])
        elif kind == "hand_over":
            state.hand_over(values[0], now_ns)
        elif kind == "settle":
            state.settle(values[0], now_ns)
        elif kind == "completed":
            self._strategies.lengths.observe(self._requests[values[0]][0], values[1])
        elif kind == "place":
            self._place(values[0], values[1], now_ns)
        elif kind == "recheck":
            self._recheck(values[0], now_ns)
        elif kind == "locate":
            looked, produced = _looked(words[1:])
            locate(
                self._requests[values[0]][0],
                values[2:],
                values[1],
                looked,
                produced,
                state,
                self._strategies,
                self._rng,
                now_ns,
                self._capture,
            )

    def _place(self, request_id: int, attempt: int, now_ns: int) -> None:
        request, blocks, slo = self._requests[request_id]
        with suppress(Rejected, InstanceDown):  # a rejection is a decision like others, and was captured
            self._placements[request_id] = place(
                request, blocks, slo, self._state, self._strategies, self._rng, now_ns, self._capture, attempt
            )

    def _recheck(self, request_id: int, now_ns: int) -> None:
        request, _, slo = self._requests[request_id]
        placement = self._placements[request_id]
        view = self._state.view(now_ns, request.prompt_tokens, ())
        placement.update_tbt(view)
        with suppress(Rejected):
            admit(
                request,
                placement,
                slo,
                view,
                Stage.DECODE,
                self._strategies.admission,
                self._rng,
                now_ns,
                self._capture,
            )


def _looked(words: Sequence[str]) -> tuple[list[tuple[str, Tier]], int]:
    """Where somebody had looked, and how many tokens the client had. Rows from before there were tiers name nodes only,
    whose host memory is meant, and no tokens."""
    places = [place.partition("/") for place in words[0].split(",") if place != NOWHERE]
    return [(node, Tier(tier or Tier.DRAM)) for node, _, tier in places], int(words[1]) if len(words) > 1 else 0


def _request(row: Row) -> tuple[Request, tuple[int, ...], SLO]:
    """The request as policy saw it; its tokens are no business of policy's."""
    request = Request(
        request_id=row["request_id"],
        arrival_ns=row["arrival_ns"],
        prompt_tokens=row["prompt_tokens"],
        max_tokens=row["max_tokens"],
        tenant=row["tenant"],
        session=row["session"],
        turn=row["turn"],
        parent=row["parent"],
        priority=row["priority"],
    )
    return request, tuple(row["blocks"]), SLO(row["slo_ttft_s"], row["slo_tbt_s"])


def _outcome(row: Row) -> tuple[Any, ...]:
    return row["choice"], row["source"], row["reused_tokens"], row["expected_s"], row["reason"]


def _pair(row: Row | None, again: Decision) -> Redecided:
    made = (again.choice, again.source, again.reused_tokens, again.expected_s, again.reason)
    if row is None or (row["request_id"], row["stage"]) != (again.request_id, again.stage):
        return Redecided(again.request_id, again.stage, None if row is None else _outcome(row), made)
    return Redecided(again.request_id, again.stage, _outcome(row), made)
