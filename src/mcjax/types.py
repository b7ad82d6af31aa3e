"""The words every package shares: requests, blocks, formats, and the protocols lower rows need from higher ones.

Units are in the names (`_s`, `_ns`, `_bytes`, `_tokens`); times in `_ns` are integer nanoseconds since the run began.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import ConfigError

NS_PER_S = 1_000_000_000

BlockKey = bytes
"""Opaque, chained: it stands for a block of tokens and everything before it, under one namespace."""

BlockId = int
"""Stands for a `BlockKey` inside one process and one run. Below 2^63."""

Tokens = NDArray[np.int32]


class Tier(enum.StrEnum):
    """Where a replica of a block lives inside a node."""

    HBM = "hbm"
    DRAM = "dram"
    SSD = "ssd"


class Role(enum.StrEnum):
    """What an instance does."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class SLO:
    """What a request was promised. `tbt_s` bounds the mean of the longest 10 % of its token intervals."""

    ttft_s: float
    tbt_s: float


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampler parameters. Randomness is counter-based, keyed (seed, position): it knows nothing of batch or place.

    Temperature 0 is greedy. Filters (`top_k`, `top_p`, `min_p`) apply after penalties and temperature, in that order.
    The repetition penalty looks at prompt and output, presence and frequency penalties at the output alone. A stop
    token ends the output and belongs to it; a stop string ends the text before it. Neither ends it before `min_tokens`.
    """

    temperature: float = 0.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    top_k: int = 0
    """Only so many of the likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Only tokens with at least this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    """Report log probabilities, with so many alternatives a token; None: none at all."""
    n: int = 1
    """So many outputs of one prompt, which share its pages. Output i > 0 draws from a seed of its own."""

    def __post_init__(self) -> None:
        checks = (
            ("temperature", 0 <= self.temperature < math.inf, "must be 0 or more"),
            ("min_tokens", self.min_tokens >= 0, "must be 0 or more"),
            ("top_k", self.top_k >= 0, "must be 0 (all) or more"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0, at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "must be from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "must be above 0"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "must be from -2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "must be from -2 to 2"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "must be 0 or more"),
            ("n", self.n >= 1, "must be at least 1"),
            ("stop_strings", all(self.stop_strings), "holds an empty string"),
        )
        for name, fine, problem in checks:
            if not fine:
                raise ConfigError(f"sampling.{name}", getattr(self, name), problem)

    @property
    def penalises(self) -> bool:
        """Whether it needs to know which tokens there have been."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def plain(self) -> bool:
        """Whether temperature and seed are all that the choice of a token takes."""
        filters = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        held = self.min_tokens > 0 and bool(self.stop_tokens)
        return not (filters or held or self.penalises or self.logprobs is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Log probabilities of `T` output tokens, of the model's own distribution (before penalties, temperature, filters).

    `chosen`: `[T]` float32; `top_tokens`, `top`: `[T, K]` int32 and float32, the likeliest first.
    """

    chosen: NDArray[np.float32]
    top_tokens: NDArray[np.int32]
    top: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class CacheHint:
    """A proposal about a request's blocks. The pool grants, clips or refuses it, and says which."""

    kind: Literal["retain", "prefetch", "demote", "pin", "share"]
    tokens: int
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt to answer. It carries no output length: nobody but the simulated executor may know the future.

    Either `tokens` (`[T]` int32) or `trace_ids` (one chained id a block, the last may be partial) names the content.
    """

    request_id: int
    arrival_ns: int
    prompt_tokens: int
    max_tokens: int
    tokens: Tokens | None = None
    trace_ids: tuple[int, ...] | None = None
    trace_block_tokens: int = 0
    tenant: str = "default"
    session: str = ""
    turn: int = 0
    parent: int | None = None
    priority: int = 0
    sampling: Sampling = Sampling()
    slo: SLO | None = None
    hints: tuple[CacheHint, ...] = ()
    accepts_lossy: bool = False
    timeout_s: float | None = None
    """It fails if it has not ended so long after it was submitted. None: as the service says."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive blocks of one prefix chain: the unit of messages, log rows and moves."""

    blocks: tuple[BlockId, ...]

    def __len__(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one cache layout. `block_multiple`: a match in it ends at a multiple of so many blocks.

    `window_tokens`: what its layers see, of kind `window`; 0: everything.
    """

    name: str = "full"
    kind: Literal["full", "window", "latent", "state"] = "full"
    bytes_per_token: int = 0
    block_multiple: int = 1
    window_tokens: int = 0

    def visible(self, context_tokens: int) -> int:
        """Tokens of a context that its layers still see."""
        return min(context_tokens, self.window_tokens) if self.window_tokens else context_tokens


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The logical layout of a block, part of its namespace. `fingerprint` names the model's weights and dtype."""

    fingerprint: str
    block_tokens: int
    groups: tuple[KVGroup, ...]

    @property
    def bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def block_bytes(self) -> int:
        return self.bytes_per_token * self.block_tokens


@dataclass(slots=True)
class Decision:
    """What a strategy chose and what it expected; `outcome` is filled in beside it when it is known.

    `candidates` holds one vector a column (for instance queue, transfer and compute estimates, in seconds), indexed
    like `names`.
    """

    time_ns: int
    request_id: int
    stage: str
    strategy: str
    choice: str
    source: str = ""
    reused_tokens: int = 0
    expected_s: float = float("nan")
    names: Sequence[str] = ()
    candidates: dict[str, NDArray[np.float64]] = field(default_factory=dict[str, NDArray[np.float64]])
    reason: str = ""
    outcome_s: float = float("nan")
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class Script:
    """The hidden future of a request in worlds that compute no logits. Only a simulated executor may read it."""

    output_tokens: int
    tokens: Tokens | None = None


class RequestState(enum.StrEnum):
    """How a request ended; only `COMPLETED` ones have latencies."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Miss(enum.StrEnum):
    """Why a part of a prompt had to be computed."""

    UNSEEN = "unseen"
    """No pool is known to have had it."""
    EVICTED = "evicted"
    """Every copy had left for want of room."""
    PENDING = "pending"
    """Expected there, and not there yet: another request was computing it, or the conductor's view was stale."""
    ELSEWHERE = "elsewhere"
    """Another node had it, and the placement did not ask for it."""
    SKIPPED = "skipped"
    """It could have been brought, and was not: `skip_reason` says why."""
    FAULT = "fault"
    """It was lost, corrupt, or could not be read or moved."""
    LOSSY = "lossy"
    """It lies in a lossy encoding only, which the request does not accept."""


@dataclass(slots=True, eq=False)
class Branch:
    """What came of output i > 0 of a request with `n > 1`."""

    output: list[int] | None
    output_tokens: int
    finish_reason: str
    logprobs: Logprobs | None


@dataclass(slots=True, eq=False)
class RequestRow:
    """One line of `requests.parquet`, filled in as the request goes its way and recorded once, when it ends."""

    request: Request
    blocks: tuple[BlockId, ...] = ()
    state: RequestState = RequestState.FAILED
    reason: str = ""
    prefill_instance: str = ""
    decode_instance: str = ""
    attempts: int = 0
    hbm_tokens: int = 0
    """Prompt tokens found on the prefill instance's own device: like what follows, as the first attempt found it."""
    local_tokens: int = 0
    """Prompt tokens found in the prefill node's own pool."""
    remote_tokens: int = 0
    """Prompt tokens pulled from another node's pool."""
    ssd_tokens: int = 0
    """Prompt tokens brought up from an SSD."""
    available_tokens: int | None = None
    """Prompt tokens of the longest prefix that the conductor knew of anywhere; None while nobody has looked."""
    routed_tokens: int | None = None
    """Prompt tokens that the placement expected not to be computed."""
    missed_tokens: Mapping[Miss, int] | None = None
    """The rest of the prompt, by cause."""
    skip_reason: str = ""
    """Why tokens were skipped: the first reason, if there were several."""
    prefill_start_ns: int = -1
    first_token_ns: int = -1
    finish_ns: int = -1
    output_tokens: int = 0
    """Of all outputs."""
    finish_reason: str = ""
    """Why output 0 ended: `stop` or `length`; empty if it did not."""
    token_ends_ns: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])
    """When each token of output 0 was there, in pieces, the first token first."""
    output: list[int] | None = None
    """Tokens of output 0; None in worlds without token ids."""
    logprobs: Logprobs | None = None
    """Of output 0, where they were asked for."""
    branches: list[Branch] = field(default_factory=list[Branch])
    """Outputs 1, 2 ... of a request with `n > 1`."""
    slo_ttft_s: float = float("inf")
    slo_tbt_s: float = float("inf")

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed, of all tiers."""
        return self.hbm_tokens + self.local_tokens + self.remote_tokens + self.ssd_tokens


class Scripts(Protocol):
    """Where simulated executors look the future up."""

    def script(self, request_id: int) -> Script: ...


class Recorder(Protocol):
    """Where every layer leaves its rows. Cheap: a row costs little more than the tuple of its cells."""

    def event(
        self,
        time_ns: int,
        kind: str,
        request_id: int,
        place: str,
        *,
        tier: str = "",
        first_block: BlockId = -1,
        blocks: int = 0,
        tokens: int = 0,
        nbytes: int = 0,
        start_ns: int = -1,
        detail: str = "",
    ) -> None:
        """A thing that happened at `place` (an instance, node or link); `start_ns` makes it an interval."""
        ...

    def decision(self, decision: Decision) -> Decision:
        """Keep a decision; its outcome may be set on the returned object until its request has ended."""
        ...

    def report(
        self, time_ns: int, tick_ns: int, source: str, kind: str, values: Sequence[int] | NDArray[np.int64]
    ) -> None:
        """A report as policy saw it: read at `time_ns`, as of `tick_ns`."""
        ...

    def request(self, row: RequestRow) -> None:
        """A request that has ended, however it did."""
        ...

    def sample(self, time_ns: int, source: str, metric: str, value: float) -> None:
        """A gauge read at a fixed tick of run time (residency, queue, link)."""
        ...

    def samples(self, time_ns: int, sources: Sequence[str], metric: str, values: Sequence[float]) -> None:
        """The same gauge of many sources; both lists are the recorder's from then on."""
        ...

    def outcome(self, time_ns: int, mechanism: str, call: int, payload: dict[str, Any]) -> None:
        """What a real mechanism answered to its `call`-th call, so that the run can be replayed without it."""
        ...


class NullRecorder:
    """A recorder that forgets; for tests and for callers who only want the result."""

    def event(self, time_ns: int, kind: str, request_id: int, place: str, **_: Any) -> None:
        pass

    def decision(self, decision: Decision) -> Decision:
        return decision

    def report(
        self, time_ns: int, tick_ns: int, source: str, kind: str, values: Sequence[int] | NDArray[np.int64]
    ) -> None:
        pass

    def request(self, row: RequestRow) -> None:
        pass

    def sample(self, time_ns: int, source: str, metric: str, value: float) -> None:
        pass

    def samples(self, time_ns: int, sources: Sequence[str], metric: str, values: Sequence[float]) -> None:
        pass

    def outcome(self, time_ns: int, mechanism: str, call: int, payload: dict[str, Any]) -> None:
        pass


ChatMessage = Mapping[str, str | Sequence[int]]
"""`role` and `content`. A content of token ids stands in the prompt as it is: an answer as the model gave it."""


class Tokenizer(Protocol):
    """Text to token ids and back. `decode(tokens)` is the UTF-8 text of their `token_bytes`, one after the other."""

    vocab_size: int
    end_tokens: tuple[int, ...]
    """Tokens with which a model ends its answer."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text that nobody need trust: no control token comes of it, whatever it spells."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; control tokens are left out, and bytes that are no UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to the text: bytes, since a character may be spread over tokens. None: a control token's.

        Raises `ValueError` for an id outside the vocabulary.
        """
        ...

    def apply_chat_template(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation; control tokens come from the template alone. `add_generation_prompt`: up to where the
        answer begins. Raises `ChatTemplateError` for messages that the template does not take."""
        ...


class Packer(Protocol):
    """How the bytes of a block rest in a memory: as they were computed, or in fewer. Injected where bytes rest."""

    name: str
    """Of the encoding. Two of one name, for blocks of one layout, write the same bytes."""
    lossy: bool
    """Whether what comes out may differ from what went in."""
    block_bytes: int
    """Of a block as it was computed."""
    packed_bytes: int
    """Of a block at rest: a function of its layout, the same for every block."""

    def pack(self, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """`[block_bytes]` to `[packed_bytes]`. Raises `Unencodable` for numbers that the encoding has no place for."""
        ...

    def unpack(self, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """`[packed_bytes]` to `[block_bytes]`."""
        ...
