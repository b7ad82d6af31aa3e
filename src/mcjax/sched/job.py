"""What travels with a request: the job, where it was placed, and the record that hands it from prefill to decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mcjax.kvpool.holds import Pin, Reservation
from mcjax.sched.view import ClusterView
from mcjax.types import SLO, BlockId, Decision, Request, RequestRow, Tokens

Listener = Callable[[Tokens | None, NDArray[np.int64]], None]


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way. `produced` output tokens have been given to the client; they are never taken back."""

    request: Request
    blocks: tuple[BlockId, ...]
    slo: SLO
    row: RequestRow
    output: list[int] | None
    produced: int = 0
    listener: Listener | None = None
    request_id: int = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id

    def emit(self, first: int, tokens: Tokens | None, ends_ns: NDArray[np.int64]) -> None:
        """Output tokens number `first`, `first + 1`, ... exist; what the client already has (a replay) is left out."""
        skip = self.produced - first
        if skip >= len(ends_ns):
            return
        if skip > 0:
            ends_ns = ends_ns[skip:]
            tokens = None if tokens is None else tokens[skip:]
        if self.produced == 0:
            self.row.first_token_ns = int(ends_ns[0])
        self.row.token_ends_ns.append(ends_ns)
        self.produced += len(ends_ns)
        if self.output is not None and tokens is not None:
            self.output.extend(tokens.tolist())
        if self.listener is not None:
            self.listener(tokens, ends_ns)


@dataclass(slots=True, eq=False)
class Placement:
    """Where the conductor wants a job: names of instances and nodes, and what it expects of that."""

    prefill: str
    decode: str
    source_node: str | None
    reused_tokens: int
    receiving_node: str
    expected_ttft_s: float
    expected_tbt_s: float
    decision: Decision
    decode_decision: Decision | None = None
    prefill_index: int = -1
    decode_index: int = -1
    prefill_estimate_ns: int = 0
    order: int = 0
    """The job's number at the prefill instance, once that has taken it on."""

    def update_tbt(self, view: ClusterView) -> None:
        """Bring the expected token interval up to date; the job's own share is already among what is pending."""
        if self.decode in view.decode.names:
            self.expected_tbt_s = float(view.decode.step_s()[view.decode.names.index(self.decode)])


@dataclass(slots=True, eq=False)
class CompletionRecord:
    """A finished prompt, sent from prefill to decode by way of the conductor.

    The blocks lie in the receiving node's pool under `pin`; the trailing partial block, which no other request may ever
    match, in the one slot of `tail` (which has none if the prompt ends with a full block). Checksums are of the bytes
    as computed.
    """

    request_id: int
    blocks: tuple[BlockId, ...]
    checksums: tuple[bytes, ...]
    prompt_tokens: int
    first_token: int | None
    output_ended: bool
    pin: Pin
    tail: Reservation
    tail_checksum: bytes = b""
