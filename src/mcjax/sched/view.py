"""What policy sees: a frozen struct of NumPy columns, one entry an instance, built from reports and own decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mcjax.cost.base import CostModel

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """The instances that decode, `[D]` each."""

    names: tuple[str, ...]
    batch: Integers
    """Sequences being decoded or on their way."""
    context_tokens: Integers
    """Tokens those sequences hold."""
    free_tokens: Integers
    """Tokens that more sequences could hold."""
    cost: CostModel
    _steps_s: dict[tuple[int, int], Floats] = field(default_factory=dict[tuple[int, int], Floats], repr=False)

    def step_s(self, more_sequences: int = 0, more_tokens: int = 0) -> Floats:
        """`[D]` expected decode step with so much more on each instance. Not to be written into: it is kept for who
        asks again."""
        more = (more_sequences, more_tokens)
        found = self._steps_s.get(more)
        if found is None:
            found = self.cost.decode_s(self.batch + more_sequences, self.context_tokens + more_tokens)
            self._steps_s[more] = found
        return found


_NO_TIME = np.zeros(1)
"""Fits every view: a row of one number."""


@dataclass(frozen=True, slots=True)
class SSDColumns:
    """The SSDs of the nodes whose instances may compute the prompt, `[I]` each."""

    tokens: Integers
    """Prompt tokens there beyond those that the node's host memory holds."""
    queued_bytes: Integers
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster as the conductor knows it at `time_ns`, for one request. Arrays are `[I]`, one entry an instance that
    may compute the request's prompt, unless stated otherwise."""

    time_ns: int
    prompt_tokens: int
    expected_output_tokens: int
    """The length predictor's guess; nobody here knows better."""
    block_tokens: int
    names: tuple[str, ...]
    nodes: tuple[str, ...]
    queue_s: Floats
    """Expected time until the instance would start on a new prompt."""
    prefix_tokens: Integers
    """Prompt tokens that the instance's node holds, or will hold by the conductor's own decisions."""
    available_tokens: int
    """Prompt tokens of the longest prefix known of on any node, in host memory or on its SSD."""
    outgoing_bytes: Integers
    """Bytes queued to leave the instance's node."""
    decode: DecodeColumns
    cost: CostModel
    bytes_per_token: int
    network_bytes_per_s: float
    network_latency_s: float
    ssd: SSDColumns | None = None
    """None while no node has anything on an SSD."""
    _local_s: list[Floats] = field(default_factory=list[Floats], repr=False)
    """Compute times with the local prefixes: strategies ask for them, and the record does."""

    def prefill_s(self, reused_tokens: Integers) -> Floats:
        """`[I]` expected compute time of the prompt when so many tokens (`[I]`) need not be computed."""
        if reused_tokens is not self.prefix_tokens:
            return self.cost.prefill_s(self.prompt_tokens, reused_tokens)
        if not self._local_s:
            self._local_s.append(self.cost.prefill_s(self.prompt_tokens, reused_tokens))
        return self._local_s[0]

    @property
    def ssd_tokens(self) -> Integers:
        """Prompt tokens beyond `prefix_tokens` that lie on the SSD of the instance's node."""
        return np.zeros_like(self.prefix_tokens) if self.ssd is None else self.ssd.tokens

    def load_s(self, tokens: Integers) -> Floats:
        """`[I]` expected time to bring so many tokens (`[I]`) from the SSD of the instance's node into its host memory,
        behind what is queued there. Nothing is ever there where there is no SSD."""
        ssd = self.ssd
        if ssd is None:
            return np.where(tokens > 0, np.inf, 0.0)
        seconds = ssd.latency_s + (tokens * self.bytes_per_token + ssd.queued_bytes) / ssd.bytes_per_s
        return np.where(tokens > 0, seconds, 0.0)

    def reusable(self) -> tuple[Integers, Floats]:
        """`[I]` prompt tokens of the instance's own node that need not be computed, and the time until those are in its
        host memory: what the SSD has counts where loading it is expected to be quicker than computing it."""
        held, ssd = self.prefix_tokens, self.ssd
        if ssd is None:
            return held, _NO_TIME
        load_s = self.load_s(ssd.tokens)
        deeper = held + ssd.tokens
        pays = load_s + self.prefill_s(deeper) < self.prefill_s(held)
        return np.where(pays, deeper, held), np.where(pays, load_s, 0.0)

    def holder(self) -> int:
        """The column whose node has the longest prefix in host memory; of several such, one with the least queued to
        leave it."""
        first = int(self.prefix_tokens.argmax())
        if not self.outgoing_bytes[first]:
            return first
        tied = self.prefix_tokens == self.prefix_tokens[first]
        return int(np.where(tied, self.outgoing_bytes, np.iinfo(np.int64).max).argmin())

    def transfer_s(self, source: int, moved_tokens: Integers) -> Floats:
        """`[I]` expected time to pull so many tokens (`[I]`) from `source`'s node, behind what it already sends."""
        nbytes = moved_tokens * self.bytes_per_token
        seconds = self.network_latency_s + (nbytes + self.outgoing_bytes[source]) / self.network_bytes_per_s
        return np.where(moved_tokens > 0, seconds, 0.0)
