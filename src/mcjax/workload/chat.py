"""The demo of the real engine: two tenants' multi-turn chats in plain English, one token a byte by default."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np

from mcjax.errors import ConfigError
from mcjax.types import Script, Tokenizer, Tokens
from mcjax.workload.arrivals import arrivals_ns
from mcjax.workload.conversation import TURNS_PER_SESSION, Conversation, Limits, Message, Opening
from mcjax.workload.phrases import ANSWERS, INSTRUCTIONS, QUESTIONS, STATEMENTS, Grammar, sentence
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
from mcjax.workload.tenants import Tenant, deal_tenants, parse_tenants

DEFAULT_TENANTS: Mapping[str, Mapping[str, Any]] = {
    "helpdesk": {"share": 1.0, "priority": 1, "system_prompt_tokens": 300},
    "research": {"share": 1.0, "priority": 0, "system_prompt_tokens": 360},
}


class Chat:
    """Conversations of composed sentences. Each turn asks for a number of tokens, and gets exactly that many.

    A first prompt is the tenant's system prompt, a note that the user pastes, and a question; later turns add a
    question. What the engine answered goes into the next prompt token by token, never by way of text, so a prefix stays
    a prefix. The client names the length it wants as `max_tokens`: that is no secret, and the script says the same.
    Lengths are in tokens of `tokenizer`; texts are whole sentences, as many as fit, and at least one. Ranges are
    `[low, high]`, both included. With the default lengths every session of four turns ends within 1,500 tokens.

    Args:
        seed: of the `workload` stream; 0 or more.
        sessions: how many; tenants take turns by share.
        turns: turns a session, range.
        tenants: name to `{share, priority, system_prompt_tokens}`.
        note_tokens: the note pasted in a first turn, range.
        user_tokens: each question, range.
        output_tokens: tokens that each request asks for, range.
        max_prompt_tokens: sessions end rather than exceed it.
        rate_per_s: sessions that start in a second (Poisson).
        think_time_s: mean of the exponential pause between an answer and the next turn.
        hints: whether requests carry cache hints.
        temperature: of the requests' samplers.
        accepts_lossy: whether cached blocks will do whose numbers an encoding has rounded.
        tokenizer: None for one token a byte (ids 0 to 255).
        block_tokens: block size to dictate, or None.
    """

    def __init__(
        self,
        seed: int,
        sessions: int = 12,
        turns: Range = 4,
        tenants: Mapping[str, Mapping[str, Any]] = DEFAULT_TENANTS,
        note_tokens: Range = (0, 400),
        user_tokens: Range = (70, 100),
        output_tokens: Range = (64, 96),
        max_prompt_tokens: int = 1500,
        rate_per_s: float = 4.0,
        think_time_s: float = 0.5,
        hints: bool = False,
        temperature: float = 0.0,
        tokenizer: Tokenizer | None = None,
        block_tokens: int | None = None,
        accepts_lossy: bool = False,
    ):
        self.name = "chat"
        self.block_tokens = block_tokens
        self._turns = bounds("turns", turns, 1)
        self._note = bounds("note_tokens", note_tokens, 0)
        self._user = bounds("user_tokens", user_tokens, 1)
        self._output = bounds("output_tokens", output_tokens, 1)
        whole("seed", seed, 0)
        whole("sessions", sessions, 1)
        number("think_time_s", think_time_s, 0)
        number("temperature", temperature, 0)
        whole("max_prompt_tokens", max_prompt_tokens, 1)
        rate("rate_per_s", rate_per_s)
        if block_tokens is not None:
            whole("block_tokens", block_tokens, 1)
        if self._turns[1] > TURNS_PER_SESSION:
            raise ConfigError("workload.turns", self._turns[1], f"must be at most {TURNS_PER_SESSION}")
        self._tenants = parse_tenants(tenants)
        self._seed = seed
        self._sessions = sessions
        self._rate_per_s = rate_per_s
        self._think_time_s = think_time_s
        self._tokenizer = tokenizer
        self._limits = Limits(max_prompt_tokens, temperature, hints, 2 * think_time_s, accepts_lossy)
        self._system = {tenant.name: self._system_prompt(tenant) for tenant in self._tenants}
        for tenant in self._tenants:
            longest = len(self._system[tenant.name]) + self._note[1] + self._user[1]
            if longest > max_prompt_tokens:
                problem = f"a first prompt of tenant {tenant.name} may take about {longest} tokens, with no room for it"
                raise ConfigError("workload.max_prompt_tokens", max_prompt_tokens, problem)

    def reseeded(self, seed: int) -> Self:
        """The same traffic under another seed."""
        other = copy.copy(self)
        other._seed = seed
        return other

    def sessions(self) -> Iterator[Conversation]:
        """Sessions in order of arrival; each is made when it is asked for."""
        starts_ns = arrivals_ns(stream(self._seed, ARRIVALS), self._sessions, self._rate_per_s)
        order = deal_tenants(self._tenants, self._sessions)
        for index, (start_ns, tenant) in enumerate(zip(starts_ns.tolist(), order, strict=True)):
            yield self._session(index, start_ns, tenant)

    def inputs(self) -> dict[str, str]:
        return {}

    def _session(self, index: int, start_ns: int, tenant: Tenant) -> Conversation:
        turns = draw(stream(self._seed, SESSION, index), self._turns)
        opening = Opening(index, start_ns, tenant, self._system[tenant.name], turns)
        return Conversation(opening, lambda turn: self._message(index, turn), self._limits)

    def _system_prompt(self, tenant: Tenant) -> Tokens:
        if tenant.system_prompt_tokens == 0:
            return np.empty(0, np.int32)
        rng = stream(self._seed, SHARED, 0, *tenant.name.encode())
        opening = f"You answer for the {tenant.name} team."
        return self._tokens(self._compose(rng, INSTRUCTIONS, opening, tenant.system_prompt_tokens))

    def _message(self, index: int, turn: int) -> Message:
        rng = stream(self._seed, SESSION, index, turn + 1)
        output_tokens = draw(rng, self._output)
        think_ns = exponential_ns(rng, self._think_time_s)
        note_tokens = draw(rng, self._note) if turn == 0 else 0
        note = self._compose(rng, STATEMENTS, "\nNote:", note_tokens) if note_tokens else ""
        question = self._compose(rng, QUESTIONS, "\nUser:", draw(rng, self._user))
        answer = " " + sentence(rng, ANSWERS)
        while len(self._tokens(answer)) < output_tokens:
            answer += " " + sentence(rng, ANSWERS)
        script = Script(output_tokens, self._tokens(answer)[:output_tokens])
        return Message(self._tokens(f"{note}{question}\nAssistant:"), output_tokens, script, think_ns)

    def _compose(self, rng: np.random.Generator, grammar: Grammar, start: str, tokens: int) -> str:
        """`start` and whole sentences, at least one, as many as fit in `tokens`."""
        text = f"{start} {sentence(rng, grammar)}"
        while len(self._tokens(longer := f"{text} {sentence(rng, grammar)}")) <= tokens:
            text = longer
        return text

    def _tokens(self, text: str) -> Tokens:
        if self._tokenizer is None:
            return np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        return np.array(self._tokenizer.encode(text), np.int32)
