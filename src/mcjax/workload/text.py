"""Real text for a real model: prompts and conversations of a file, through the model's own tokenizer and template."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from mcjax.errors import ChatTemplateError, ConfigError, TraceError
from mcjax.types import ChatMessage, Request, Sampling, Script, Tokenizer, Tokens
from mcjax.workload.arrivals import arrivals_ns
from mcjax.workload.base import Turn
from mcjax.workload.conversation import TURNS_PER_SESSION
from mcjax.workload.files import contents, find
from mcjax.workload.phrases import ANSWERS, sentence
from mcjax.workload.streams import ARRIVALS, SESSION, exponential_ns, number, rate, stream, whole
from mcjax.workload.text_file import Row, parse

QUESTIONS = Path(__file__).with_name("questions.jsonl")
"""What is asked where no file is given."""
SOURCE = "docs/workload.md says what it may look like"


class Text:
    """Each row of a file is a session. Of one with several turns, the next prompt holds the answers as they came.

    An answer goes into the next prompt as the tokens that the model gave, closed as the template closes it, so a prefix
    stays a prefix. Requests stop at the model's end tokens. In worlds without logits the answers are composed
    sentences, of `output_tokens` (a row's, else as many as it may have).

    Args:
        seed: of the `workload` stream; 0 or more.
        path: the file: as given, else under `$MCJAX_TRACES`, else under `./traces`; None for the questions shipped.
        tokenizer: the model's; a run gives it.
        chat: a prompt is what a user says, and goes through the chat template; False: it is sent as it is.
        system: a system message before every conversation that has none; None leaves it to the template.
        max_tokens: of a row that does not say.
        sampling: likewise, by the names of `types.Sampling` (no tokens; `seed` null: the request's id).
        ignore_eos: likewise: whether to go on after an end token.
        max_prompt_tokens: a session ends rather than send a longer prompt; None for no bound.
        rate_per_s: sessions that start in a second (Poisson), unless the file has `arrival_s`; None: all at once.
        think_time_s: mean of the exponential pause between an answer and the next turn.
        limit: take only the first so many rows; None for all.
        accepts_lossy: whether cached blocks will do whose numbers an encoding has rounded.

    Raises `ConfigError` for an argument that cannot work, `TraceError` for a row.
    """

    verified_by_default = False
    """Few rows exercise all that a verified run is to show."""

    def __init__(
        self,
        seed: int,
        path: str | None = None,
        tokenizer: Tokenizer | None = None,
        chat: bool = True,
        system: str | None = None,
        max_tokens: int = 128,
        sampling: Mapping[str, Any] | None = None,
        ignore_eos: bool = False,
        max_prompt_tokens: int | None = None,
        rate_per_s: float | None = 4.0,
        think_time_s: float = 0.5,
        limit: int | None = None,
        accepts_lossy: bool = False,
    ):
        self.name = "text"
        self.block_tokens: int | None = None
        if tokenizer is None:
            raise ConfigError("workload.tokenizer", None, "text needs the model's tokenizer")
        self._seed = whole("seed", seed, 0)
        self._think_time_s = number("think_time_s", think_time_s, 0)
        self._rate_per_s = rate_per_s if rate_per_s is None else rate("rate_per_s", rate_per_s)
        for name, value in {"max_prompt_tokens": max_prompt_tokens, "limit": limit}.items():
            if value is not None:
                whole(name, value, 1)
        self._max_tokens = whole("max_tokens", max_tokens, 1)
        self._max_prompt_tokens = max_prompt_tokens
        self._accepts_lossy = accepts_lossy
        self._tokenizer, self._chat, self._system, self._ignore_eos = tokenizer, chat, system, ignore_eos
        self._sampling = sampling_of(sampling or {})
        self._sampling_seed: int | None = (sampling or {}).get("seed")
        found = QUESTIONS if path is None else find(path, SOURCE)
        lines, sha256 = contents(found)
        self._path, self._inputs = str(found), {str(found): sha256}
        self._rows = parse(lines, self._path, limit)
        self._first = [self._checked(index, row) for index, row in enumerate(self._rows)]

    @property
    def total_requests(self) -> int:
        """Unless sessions end early."""
        return sum(max(1, len(row.turns)) for row in self._rows)

    def reseeded(self, seed: int) -> Self:
        """The same texts under another seed."""
        other = copy.copy(self)
        other._seed = seed
        return other

    def sessions(self) -> Iterator[Talk]:
        """One session a row, in order of arrival; ties as in the file."""
        starts_ns = self._starts_ns()
        for index in sorted(range(len(self._rows)), key=lambda index: starts_ns[index]):
            yield Talk(self, index, starts_ns[index])

    def inputs(self) -> dict[str, str]:
        return dict(self._inputs)

    def _starts_ns(self) -> list[int]:
        given = [row.arrival_ns for row in self._rows if row.arrival_ns is not None]
        if given:
            return given
        if self._rate_per_s is None:
            return [0] * len(self._rows)
        return arrivals_ns(stream(self._seed, ARRIVALS), len(self._rows), self._rate_per_s).tolist()

    def _checked(self, index: int, row: Row) -> Tokens:
        """`[T]`, the first prompt of a row; everything that could be wrong with the row shows here, not in mid-run."""
        name = "turns" if row.turns else "messages" if row.messages else "prompt"
        if len(row.turns) > TURNS_PER_SESSION:
            raise TraceError(self._path, row.number, name, f"has more than {TURNS_PER_SESSION} turns")
        try:
            self.sampling(index, 0)
            self.prompt(index, [()] * (len(row.turns) - 1))
            tokens = self.prompt(index, [])
        except (ConfigError, ChatTemplateError) as problem:
            about = problem.key.removeprefix("sampling.") if isinstance(problem, ConfigError) else name
            raise TraceError(self._path, row.number, about, str(problem)) from None
        if len(tokens) == 0:
            raise TraceError(self._path, row.number, name, "comes to no token at all")
        if self._max_prompt_tokens is not None and len(tokens) > self._max_prompt_tokens:
            problem = f"is {len(tokens)} tokens long, and workload.max_prompt_tokens={self._max_prompt_tokens}"
            raise TraceError(self._path, row.number, name, problem)
        return tokens

    def prompt(self, index: int, answers: list[tuple[int, ...]]) -> Tokens:
        """`[T]`, what is sent in a row's turn after these answers."""
        row = self._rows[index]
        if row.prompt is not None and not self._chat:
            return _frozen(self._tokenizer.encode(row.prompt))
        messages: list[ChatMessage] = [*row.messages]
        if self._system is not None and not any(message["role"] == "system" for message in row.messages):
            messages.insert(0, {"role": "system", "content": self._system})
        turns = row.turns if row.prompt is None else (row.prompt,)
        for turn, said in enumerate(turns[: len(answers) + 1]):
            if turn > 0:
                messages.append({"role": "assistant", "content": answers[turn - 1]})
            messages.append({"role": "user", "content": said})
        return _frozen(self._tokenizer.apply_chat_template(messages))

    def sampling(self, index: int, request_id: int) -> Sampling:
        """A row's sampler. Raises `ConfigError` for one that cannot be."""
        row = self._rows[index]
        ignore_eos = self._ignore_eos if row.ignore_eos is None else row.ignore_eos
        ends = () if ignore_eos else self._tokenizer.end_tokens
        seed = request_id if self._sampling_seed is None else self._sampling_seed
        return dataclasses.replace(self._sampling, **{"seed": seed, "stop_tokens": ends, **row.sampling})

    def turn(self, index: int, turn: int, start_ns: int, answers: list[tuple[int, ...]]) -> Turn | None:
        """The request of a row's turn after these answers; None at the end."""
        row = self._rows[index]
        if turn >= max(1, len(row.turns)):
            return None
        prompt = self._first[index] if turn == 0 else self.prompt(index, answers)
        if self._max_prompt_tokens is not None and len(prompt) > self._max_prompt_tokens:
            return None
        rng = stream(self._seed, SESSION, index, turn + 1)
        think_ns = exponential_ns(rng, self._think_time_s)
        max_tokens = self._max_tokens if row.max_tokens is None else row.max_tokens
        output_tokens = max_tokens if row.output_tokens is None else min(row.output_tokens, max_tokens)
        request_id = index * TURNS_PER_SESSION + turn
        request = Request(
            request_id=request_id,
            arrival_ns=start_ns if turn == 0 else think_ns,
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            tokens=prompt,
            tenant=row.tenant,
            session=f"{row.tenant}-{index}",
            turn=turn,
            parent=request_id - 1 if turn > 0 else None,
            priority=row.priority,
            sampling=self.sampling(index, request_id),
            accepts_lossy=self._accepts_lossy,
        )
        return Turn(request, Script(output_tokens, self._composed(rng, output_tokens)))

    def _composed(self, rng: np.random.Generator, output_tokens: int) -> Tokens:
        """`[output_tokens]` tokens of sentences."""
        tokens: list[int] = []
        while len(tokens) < output_tokens:
            tokens += self._tokenizer.encode(" " + sentence(rng, ANSWERS))
        return np.array(tokens[:output_tokens], np.int32)


class Talk:
    """One row's session."""

    def __init__(self, text: Text, index: int, start_ns: int):
        self.start_ns = start_ns
        self._text = text
        self._index = index
        self._answers: list[tuple[int, ...]] = []
        self._script: Script | None = None

    def next_turn(self, answer: Tokens | None) -> Turn | None:
        """See `workload.base.Session`."""
        if self._script is not None:
            said = self._script.tokens if answer is None else answer
            self._answers.append(() if said is None else tuple(said.tolist()))
        turn = self._text.turn(self._index, len(self._answers), self.start_ns, self._answers)
        self._script = None if turn is None else turn.script
        return turn


def sampling_of(given: Mapping[str, Any]) -> Sampling:
    """The sampler that a config's `workload.sampling` describes. Raises `ConfigError` for what is no such thing."""
    fields = [field.name for field in dataclasses.fields(Sampling) if field.name != "stop_tokens"]
    for name, value in given.items():
        if name not in fields:
            raise ConfigError(f"workload.sampling.{name}", value, "the sampler has no such parameter", fields)
    values = {name: value for name, value in given.items() if value is not None}
    values["stop_strings"] = tuple(values.get("stop_strings", ()))
    try:
        return Sampling(**values)
    except ConfigError as problem:
        message = str(problem).removeprefix(f"{problem.key}={problem.value}: ")
        raise ConfigError(f"workload.{problem.key}", problem.value, message) from None


def _frozen(ids: list[int]) -> Tokens:
    tokens = np.array(ids, np.int32)
    tokens.flags.writeable = False
    return tokens
