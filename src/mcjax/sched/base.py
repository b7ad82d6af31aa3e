"""The decisions' protocols, their choices, and the doors through which the conductor reaches instances.

A strategy is a plain object with one of these methods. It sees a request, a `ClusterView` and a generator, no more.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mcjax.sched.job import CompletionRecord, Job, Placement
from mcjax.sched.view import ClusterView
from mcjax.types import Decision, Request, Role, Span, Tier


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """Column `instance` of the view computes the prompt; `source` (a column) is where a longer prefix comes from."""

    instance: int
    source: int | None = None
    reused_tokens: int = 0


class PrefillSelection(Protocol):
    """Which instance computes the prompt, and from where it takes the cached prefix."""

    def choose(self, request: Request, view: ClusterView, rng: np.random.Generator) -> PrefillChoice: ...


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """Row `instance` of `view.decode`, and the token interval that is expected there."""

    instance: int
    expected_tbt_s: float


class DecodeSelection(Protocol):
    """Which instance decodes. `ready_ns` is when the prompt's cache is expected to be there."""

    def choose(self, request: Request, view: ClusterView, ready_ns: int, rng: np.random.Generator) -> DecodeChoice: ...


class Stage(enum.StrEnum):
    """When admission is asked."""

    ARRIVAL = "arrival"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Admit:
    pass


@dataclass(frozen=True, slots=True)
class Reject:
    reason: str
    retry_after_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the placement is expected to give this request, beside what it was promised."""

    ttft_s: float
    tbt_s: float
    slo_ttft_s: float
    slo_tbt_s: float


class Admission(Protocol):
    """Whether to take a request on; asked at arrival, and again when its prompt is ready to be decoded.

    One that has nothing to say at one of them may leave it out of `asked_at` (an attribute; all stages if it is not
    there), which saves a look at the cluster.
    """

    def admit(
        self, request: Request, expectation: Expectation, view: ClusterView, stage: Stage, rng: np.random.Generator
    ) -> Admit | Reject: ...


def is_asked(admission: Admission, stage: Stage) -> bool:
    """Whether an admission strategy wants to be asked at this stage."""
    asked_at: Sequence[Stage] | None = getattr(admission, "asked_at", None)
    return asked_at is None or stage in asked_at


@dataclass(frozen=True, slots=True)
class Replica:
    """A node that is reported to hold a whole span in one of its tiers, and how long it would take to get it from there
    into the host memory of who asks."""

    node: str
    transfer_s: float
    tier: Tier = Tier.DRAM

    @property
    def place(self) -> str:
        """What rows of the log call it: its node, and the tier where that is not host memory."""
        return self.node if self.tier is Tier.DRAM else f"{self.node}/{self.tier}"


@dataclass(frozen=True, slots=True)
class Missing:
    """A span of a prompt that is not in the host memory of the node which computes it, though it was expected."""

    span: Span
    replicas: Sequence[Replica]
    """Host memories before SSDs, each in the order in which their nodes joined."""
    recompute_s: float
    """How long the instance would take to compute it."""
    priority: int = 0
    """The request's."""
    remaining_tokens: int = 0
    """How much longer its output is taken to be, by the length predictor."""


class Recompute(enum.Enum):
    """The other answer to a missing span."""

    RECOMPUTE = "recompute"


NOWHERE = "-"
"""The journal's word for no place at all."""


@dataclass(frozen=True, slots=True)
class Located:
    """The answer to a missing span, and the decision's row, in which who asked notes what came of it."""

    answer: Replica | Recompute
    decision: Decision

    @property
    def replica(self) -> Replica | None:
        """Where to get the span from; None: compute it."""
        return self.answer if isinstance(self.answer, Replica) else None

    @property
    def declined(self) -> bool:
        """Whether there were replicas, and computing was preferred."""
        return self.replica is None and len(self.decision.names) > 1

    def note(self, outcome: str, took_s: float = float("nan")) -> None:
        """What came of it ("moved", "computed", "failed"), and how long it took, if that is known."""
        self.decision.outcome = outcome
        self.decision.outcome_s = took_s


class Fetch(Protocol):
    """Where a span comes from that was expected and found missing: a replica, or computing it again."""

    def source(self, missing: Missing, rng: np.random.Generator) -> Replica | Recompute:
        """One of `missing.replicas`, or `RECOMPUTE`."""
        ...


class Tenancy(Protocol):
    """Who goes next among requests that wait for the same instance."""

    def classify(self, request: Request) -> str: ...

    def next(self, waiting: Sequence[Request]) -> int:
        """Index of the request to serve next; `waiting` is in order of arrival and not empty."""
        ...

    def charge(self, request: Request, tokens: int) -> None:
        """`tokens` were computed for the request."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes: `(index among the waiting prompts, tokens)` chunks, and whether running decodes join."""

    chunks: tuple[tuple[int, int], ...]
    decode: bool


class Batching(Protocol):
    """What a mixed instance computes next."""

    def choose(self, waiting_tokens: Sequence[int], decoding: int, chunk_tokens: int) -> Batch:
        """`waiting_tokens`: what each waiting prompt still needs, next one first; `chunk_tokens`: the longest chunk."""
        ...


class Roles(Protocol):
    """Which role an instance takes on when it joins."""

    def assign(self, instance: str, proposed: Role, view: ClusterView) -> Role: ...


class PrefillPort(Protocol):
    """A prefill instance, as the conductor sees it."""

    async def prefill(self, job: Job, placement: Placement) -> CompletionRecord: ...


class DecodePort(Protocol):
    """A decode instance, as the conductor sees it."""

    async def decode(self, job: Job, record: CompletionRecord) -> None: ...


class MixedPort(Protocol):
    """An instance that does both, as the conductor sees it."""

    async def serve(self, job: Job, placement: Placement) -> None: ...


def strategy_name(strategy: object) -> str:
    """What tables call a strategy: its `name` if it has one, else its class's."""
    return str(getattr(strategy, "name", type(strategy).__name__))
