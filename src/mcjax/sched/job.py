"""What travels with a request: the job, where it was placed, and the record that hands it from prefill to decode."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcjax.kvpool.holds import Pin, Reservation
from mcjax.sched.output import Output
from mcjax.sched.view import ClusterView
from mcjax.types import SLO, BlockId, Decision, KVFormat, Logprobs, Request, RequestRow


@dataclass(slots=True, eq=False)
class Computed:
    """A span of a prompt, by its tokens, that is computed because `decision` says so; its outcome is filled in as the
    chunks come."""

    decision: Decision
    first: int
    end: int
    _spent_s: float = 0.0

    def chunk(self, begin: int, end: int, took_s: float) -> None:
        """Tokens `begin .. end` were computed in so long; the span's share of them took its share of that."""
        mine = min(end, self.end) - max(begin, self.first)
        if mine > 0:
            self._spent_s += took_s * mine / (end - begin)
            if end >= self.end:
                self.decision.outcome, self.decision.outcome_s = "computed", self._spent_s


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way, and what its client has of each of its outputs."""

    request: Request
    blocks: tuple[BlockId, ...]
    slo: SLO
    row: RequestRow
    outputs: list[Output]
    computed: list[Computed] = field(default_factory=list[Computed])
    """Spans of this attempt that could have been fetched or not, and are computed."""
    request_id: int = field(init=False)
    lossy: bool = field(default=False, init=False)
    """Whether it has read a block that an encoding had rounded: then so is what it computes, for whoever asks."""
    first: Output = field(init=False)
    """Output 0: the prompt's computation gives its first token."""

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.first = self.outputs[0]

    @property
    def produced(self) -> int:
        """Output tokens given to the client, of all outputs."""
        return sum(output.produced for output in self.outputs) if len(self.outputs) > 1 else self.first.produced

    @property
    def complete(self) -> bool:
        """Whether every output has ended."""
        return bool(self.first.finish_reason) and all(output.finish_reason for output in self.outputs)


@dataclass(slots=True, eq=False)
class Placement:
    """Where the conductor wants a job: names of instances and nodes, and what it expects of that."""

    prefill: str
    decode: str
    source_node: str | None
    reused_tokens: int
    available_tokens: int
    """Of the longest prefix that the conductor knows of anywhere."""
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


@dataclass(frozen=True, slots=True, eq=False)
class SamplerState:
    """What the sampler needs to go on exactly where it stopped.

    Its randomness is keyed (seed, position), so this is all of it; the text follows from the tokens. `produced` tokens
    of output 0 exist (more than one after a loss: all but the first are replayed); `position` is that of the next.
    """

    seed: int
    position: int
    produced: int
    first_token: int | None
    first_logprobs: Logprobs | None = None


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
    sampler: SamplerState
    pin: Pin
    tail: Reservation
    tail_checksum: bytes = b""
    layout: KVFormat | None = None
    """How the blocks are laid out, by whoever computed them."""
