"""Files of prompts (`docs/workload.md`): plain text, a prompt a line, or JSONL, a prompt or a conversation a line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from mcjax.errors import TraceError
from mcjax.workload.files import JsonLine, JsonObject, json_lines, shown

ROLES = ("system", "user", "assistant", "tool")
CONTENTS = ("prompt", "messages", "turns")
"""A row has exactly one of these."""
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
WHOLES = ("seed", "top_k", "min_tokens", "logprobs", "n")
"""Fields that are the sampler's own, by their kind."""
OTHERS = ("system", "stop", "ignore_eos", "max_tokens", "output_tokens", "tenant", "priority", "arrival_s")
FIELDS = (*CONTENTS, *NUMBERS, *WHOLES, *OTHERS)
MOST_WHOLE = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt or conversation. `messages` go before the first of `turns`, which are what the user says in turn.

    A row without turns sends its messages as they are; one with a `prompt` has neither. `sampling` holds what the row
    says of the sampler, by the names of `types.Sampling`; None stands for what it does not say.
    """

    number: int
    prompt: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    turns: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    output_tokens: int | None = None
    tenant: str = "default"
    priority: int = 0
    arrival_ns: int | None = None


def parse(lines: Sequence[bytes], path: str, limit: int | None = None) -> list[Row]:
    """The rows of a file: JSONL if its name ends in `.jsonl`, else plain text. Blank lines are passed over.

    Raises `TraceError` for the first thing wrong, and for a file without any row.
    """
    jsonl = path.endswith(".jsonl")
    rows: list[Row] = []
    for row in _rows(lines, path) if jsonl else _prompts(lines, path):
        if limit is not None and len(rows) >= limit:
            break
        rows.append(row)
        if (row.arrival_ns is None) != (rows[0].arrival_ns is None):
            raise TraceError(path, row.number, "arrival_s", "must be in every row, or in none")
    if not rows:
        raise TraceError(path, 1, "prompt" if jsonl else "line", "the file holds no prompts")
    return rows


def _prompts(lines: Iterable[bytes], path: str) -> Iterable[Row]:
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as problem:
            raise TraceError(path, number, "line", f"is not UTF-8 ({problem.reason} at byte {problem.start})") from None
        if text:
            yield Row(number, prompt=text)


def _rows(lines: Iterable[bytes], path: str) -> Iterable[Row]:
    for line in json_lines(lines, path):
        given = {name: value for name, value in line.fields.items() if value is not None}
        for name in given:
            if name not in FIELDS:
                close = difflib.get_close_matches(name, FIELDS, 1)
                hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(FIELDS)}"
                raise line.error(name, f"is no field of a prompt; {hint}")
        contents = [name for name in CONTENTS if name in given]
        if len(contents) != 1:
            found = " and ".join(contents) or "none of them"
            raise line.error(CONTENTS[0], f"a row has exactly one of {', '.join(CONTENTS)}; there is {found}")
        yield Row(
            number=line.number,
            prompt=_text(line, "prompt") if "prompt" in given else None,
            messages=_messages(line, given),
            turns=tuple(_texts(line, "turns")) if "turns" in given else (),
            sampling=_sampling(line, given),
            ignore_eos=_switch(line, "ignore_eos") if "ignore_eos" in given else None,
            max_tokens=line.whole("max_tokens", 1) if "max_tokens" in given else None,
            output_tokens=line.whole("output_tokens", 1) if "output_tokens" in given else None,
            tenant=_text(line, "tenant") if "tenant" in given else "default",
            priority=line.whole("priority", -MOST_WHOLE, MOST_WHOLE) if "priority" in given else 0,
            arrival_ns=line.seconds_ns("arrival_s") if "arrival_s" in given else None,
        )


def _messages(line: JsonLine, given: Mapping[str, Any]) -> tuple[Mapping[str, str], ...]:
    system = ({"role": "system", "content": _text(line, "system")},) if "system" in given else ()
    if "messages" not in given:
        if system and "prompt" in given:
            raise line.error("system", "goes with turns; a prompt with a system message is written as messages")
        return system
    if system:
        raise line.error("system", "goes with turns; of messages it is the first")
    found: list[Mapping[str, str]] = []
    for message in line.objects("messages"):
        role, content = _text(message, "role"), _text(message, "content", may_be_empty=True)
        if role not in ROLES:
            raise message.error("role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
        for name in message.fields:
            if name not in ("role", "content"):
                raise message.error(name, "is no field of a message; there is role, content")
        found.append({"role": role, "content": content})
    if not found:
        raise line.error("messages", "must hold at least one message")
    return tuple(found)


def _sampling(line: JsonLine, given: Mapping[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = {name: line.whole(name, 0, MOST_WHOLE) for name in WHOLES if name in given}
    for name in NUMBERS:
        if name in given:
            if type(given[name]) not in (int, float):
                raise line.error(name, f"must be a number, not {shown(given[name])}")
            said[name] = float(given[name])
    if "stop" in given:
        stops = [given["stop"]] if isinstance(given["stop"], str) else _texts(line, "stop")
        said["stop_strings"] = tuple(_sound(line, "stop", stop) for stop in stops)
    return said


def _text(line: JsonObject, name: str, may_be_empty: bool = False) -> str:
    value = line.value(name)
    if not isinstance(value, str):
        raise line.error(name, f"must be a text, not {shown(value)}")
    if not value and not may_be_empty:
        raise line.error(name, "must not be empty")
    return _sound(line, name, value)


def _texts(line: JsonObject, name: str) -> list[str]:
    value = line.value(name)
    texts: list[Any] = cast("list[Any]", value) if isinstance(value, list) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise line.error(name, f"must be a list of texts, none of them empty, not {shown(cast('object', value))}")
    return [_sound(line, name, text) for text in texts]


def _sound(line: JsonObject, name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise line.error(name, "holds half a surrogate pair, which is no text") from None
    return text


def _switch(line: JsonObject, name: str) -> bool:
    value = line.value(name)
    if not isinstance(value, bool):
        raise line.error(name, f"must be true or false, not {shown(value)}")
    return value
