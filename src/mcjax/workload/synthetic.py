"""Generated multi-turn traffic: tenants, shared prefixes, Poisson arrivals, real token ids. Runs on any backend."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np

from mcjax.errors import ConfigError
from mcjax.types import Script, Tokens
from mcjax.workload.arrivals import FAMILIES, arrivals_ns, modulation, weibull_shape
from mcjax.workload.conversation import TURNS_PER_SESSION, Conversation, Limits, Message, Opening
from mcjax.workload.streams import (
    ARRIVALS,
    SESSION,
    SHARED,
    Range,
    bounds,
    draw,
    exponential_ns,
    number,
    rate,
    stream,
    whole,
)
from mcjax.workload.tenants import Tenant, draw_tenant, parse_tenants

DEFAULT_TENANTS: Mapping[str, Mapping[str, Any]] = {
    "interactive": {"share": 0.7, "priority": 1, "system_prompt_tokens": 128},
    "batch": {"share": 0.3, "priority": 0, "system_prompt_tokens": 256},
}


class Synthetic:
    """Sessions of random tokens that share as real traffic does: tenant prompt, few-shot examples, conversation so far.

    A first prompt is the tenant's system prompt, the few-shot examples of the session's group, and the user's tokens. A
    later one is the last prompt, its answer, and new user tokens. `max_tokens` is what every request asks for; how much
    a simulated model answers (`output_tokens`, never more) is drawn apart and stays in the script. Every session, and
    every turn in it, has a random stream of its own. Lengths are in tokens, ranges `[low, high]`, both included.

    Args:
        seed: of the `workload` stream; 0 or more.
        sessions: how many.
        tenants: name to `{share, priority, system_prompt_tokens}`.
        turns: turns a session, range.
        first_prompt_tokens: the user's part of a first prompt, range.
        user_tokens: what the user adds in each later turn, range.
        output_tokens: length of the answer in worlds that compute no logits, range; at most `max_tokens`.
        max_tokens: the limit that requests carry.
        rate_per_s: sessions that start in a second.
        arrival_cv: coefficient of variation of the gaps between sessions; 1 is Poisson.
        think_time_s: mean of the exponential pause between an answer and the next turn.
        vocab_size: token ids are drawn below it.
        few_shot_tokens: length of a group's examples; 0 for none.
        few_shot_groups: groups a tenant.
        max_prompt_tokens: sessions end rather than exceed it; None for no limit.
        hints: whether requests carry cache hints.
        temperature: of the requests' samplers.
        accepts_lossy: whether cached blocks will do whose numbers an encoding has rounded.
        block_tokens: block size to dictate, or None.
        arrival_family: of the gaps when `arrival_cv` is neither 0 nor 1: `gamma` or `weibull`.
        diurnal: `{amplitude, period_s, peak_s}`, see `arrivals.Diurnal`; None for a steady rate.
        burst: `{factor, every_s, length_s}`, see `arrivals.Burst`; None for none.
    """

    def __init__(
        self,
        seed: int,
        sessions: int = 100,
        tenants: Mapping[str, Mapping[str, Any]] = DEFAULT_TENANTS,
        turns: Range = (1, 5),
        first_prompt_tokens: Range = (64, 512),
        user_tokens: Range = (16, 128),
        output_tokens: Range = (16, 128),
        max_tokens: int = 256,
        rate_per_s: float = 2.0,
        arrival_cv: float = 1.0,
        think_time_s: float = 2.0,
        vocab_size: int = 256,
        few_shot_tokens: int = 0,
        few_shot_groups: int = 1,
        max_prompt_tokens: int | None = None,
        hints: bool = False,
        temperature: float = 0.0,
        block_tokens: int | None = None,
        arrival_family: str = "gamma",
        diurnal: Mapping[str, float] | None = None,
        burst: Mapping[str, float] | None = None,
        accepts_lossy: bool = False,
    ):
        self.name = "synthetic"
        self.block_tokens = block_tokens
        self._tenants = parse_tenants(tenants)
        self._turns = bounds("turns", turns, 1)
        self._first = bounds("first_prompt_tokens", first_prompt_tokens, 1)
        self._user = bounds("user_tokens", user_tokens, 1)
        self._output = bounds("output_tokens", output_tokens, 1)
        whole("seed", seed, 0)
        whole("sessions", sessions, 1)
        number("arrival_cv", arrival_cv, 0)
        number("think_time_s", think_time_s, 0)
        whole("vocab_size", vocab_size, 1)
        whole("few_shot_tokens", few_shot_tokens, 0)
        whole("few_shot_groups", few_shot_groups, 1)
        number("temperature", temperature, 0)
        whole("max_tokens", max_tokens, 1)
        rate("rate_per_s", rate_per_s)
        if block_tokens is not None:
            whole("block_tokens", block_tokens, 1)
        if arrival_family not in FAMILIES:
            raise ConfigError("workload.arrival_family", arrival_family, "no such family of gaps", FAMILIES)
        if arrival_family == "weibull" and arrival_cv not in (0, 1):
            weibull_shape(arrival_cv)
        if self._turns[1] > TURNS_PER_SESSION:
            raise ConfigError("workload.turns", self._turns[1], f"must be at most {TURNS_PER_SESSION}")
        if self._output[1] > max_tokens:
            raise ConfigError("workload.output_tokens", list(self._output), f"exceeds workload.max_tokens={max_tokens}")
        longest = max(t.system_prompt_tokens for t in self._tenants) + few_shot_tokens + self._first[1]
        if max_prompt_tokens is not None and longest > whole("max_prompt_tokens", max_prompt_tokens, 1):
            problem = f"a first prompt may take {longest} tokens, so some sessions could not begin"
            raise ConfigError("workload.max_prompt_tokens", max_prompt_tokens, problem)
        self._seed = seed
        self._sessions = sessions
        self._max_tokens = max_tokens
        self._rate_per_s = rate_per_s
        self._arrival_cv = arrival_cv
        self._arrival_family = arrival_family
        self._modulation = modulation(diurnal, burst)
        self._think_time_s = think_time_s
        self._vocab_size = vocab_size
        self._few_shot_tokens = few_shot_tokens
        self._few_shot_groups = few_shot_groups
        # Twice the mean pause: about 86 % of exponential pauses are over by then.
        self._limits = Limits(max_prompt_tokens, temperature, hints, 2 * think_time_s, accepts_lossy)

    def reseeded(self, seed: int) -> Self:
        """The same traffic under another seed."""
        other = copy.copy(self)
        other._seed = seed
        return other

    def sessions(self) -> Iterator[Conversation]:
        """Sessions in order of arrival; each is made when it is asked for."""
        rng = stream(self._seed, ARRIVALS)
        starts_ns = arrivals_ns(
            rng, self._sessions, self._rate_per_s, self._arrival_cv, self._arrival_family, self._modulation
        )
        for index, start_ns in enumerate(starts_ns.tolist()):
            yield self._session(index, start_ns)

    def inputs(self) -> dict[str, str]:
        return {}

    def _session(self, index: int, start_ns: int) -> Conversation:
        rng = stream(self._seed, SESSION, index)
        tenant = draw_tenant(rng, self._tenants)
        turns = draw(rng, self._turns)
        group = draw(rng, (0, self._few_shot_groups - 1))
        shared = np.concatenate(
            [
                self._shared(tenant, 0, tenant.system_prompt_tokens),
                self._shared(tenant, 1 + group, self._few_shot_tokens),
            ]
        )
        return Conversation(
            Opening(index, start_ns, tenant, shared, turns), lambda turn: self._message(index, turn), self._limits
        )

    def _shared(self, tenant: Tenant, part: int, length: int) -> Tokens:
        """Tokens that depend on the tenant's name and the part alone, so that tenants can come and go."""
        return self._draw_tokens(stream(self._seed, SHARED, part, *tenant.name.encode()), length)

    def _message(self, index: int, turn: int) -> Message:
        rng = stream(self._seed, SESSION, index, turn + 1)
        user_tokens = draw(rng, self._first if turn == 0 else self._user)
        output_tokens = draw(rng, self._output)
        think_ns = exponential_ns(rng, self._think_time_s)
        user = self._draw_tokens(rng, user_tokens)
        return Message(user, self._max_tokens, Script(output_tokens, self._draw_tokens(rng, output_tokens)), think_ns)

    def _draw_tokens(self, rng: np.random.Generator, length: int) -> Tokens:
        return rng.integers(0, self._vocab_size, length, dtype=np.int32)
