"""Chat templates: from a conversation to pieces of which only the template's own control tokens are control tokens.

A template is a Jinja program that comes with the model. It runs in a sandbox and is given the messages as text, so what
a user writes could spell a control token (`<|im_end|>`) and end its own turn. Therefore, before the template sees it, a
*mark* (a private-use character that occurs nowhere else) is put inside every control token that a content spells. In
what the template gives back, the control tokens that are still whole are its own; the marks are then taken out, and the
rest is plain text. A content of token ids goes through the template as a numbered *hole*, and is put in at the end.
Free of jax.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mcjax.errors import ChatTemplateError
from mcjax.types import ChatMessage

PRIVATE_USE = range(0xE000, 0xF900)


@dataclass(frozen=True, slots=True)
class Control:
    """A control token that the template wrote."""

    text: str


Piece = str | Control | tuple[int, ...]
"""Plain text to encode without control tokens, a control token, or token ids as they are."""


class ChatTemplate:
    """A compiled template. `controls` are the control tokens it may write; `variables` what else it may read.

    One that looks into contents sees the text with its marks, and holes for token ids: an `in` or a `trim` works.
    Raises `ChatTemplateError` for a template that cannot be read.
    """

    def __init__(self, source: str, controls: Iterable[str], variables: Mapping[str, str]):
        # A token of one character has no inside to put a mark into: it is never taken for a control token.
        self._controls = sorted((text for text in controls if len(text) > 1), key=lambda text: (-len(text), text))
        words = "|".join(map(re.escape, self._controls)) or r"(?!)"
        self._whole = re.compile(f"({words})")
        self._starts = re.compile(f"(?={words})")
        self._source = source
        self._variables = dict(variables)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except Exception as problem:
            raise ChatTemplateError(f"the chat template cannot be read: {problem}") from None

    def render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> list[Piece]:
        """The conversation in pieces. Raises `ChatTemplateError` for what the template refuses or cannot do."""
        texts = [str(value) for message in messages for value in message.values() if isinstance(value, str)]
        mark, hole = self._unused(texts)
        given: list[tuple[int, ...]] = []
        shown: list[dict[str, str]] = []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not role.isidentifier():
                raise ChatTemplateError(f"a message's role must be a word such as user, not {role!r}")
            if content is None:
                raise ChatTemplateError(f"the message of {role} has no content")
            if isinstance(content, str):
                shown.append({"role": role, "content": self._marked(content, mark)})
            else:
                shown.append({"role": role, "content": f"{hole}{len(given)}{hole}"})
                given.append(tuple(content))
        try:
            text = self._template.render(
                messages=shown, add_generation_prompt=add_generation_prompt, tools=None, **self._variables
            )
        except TemplateError as problem:
            raise ChatTemplateError(f"the chat template refuses this conversation: {problem}") from None
        except Exception as problem:  # whatever a program may run into
            raise ChatTemplateError(f"the chat template fails: {type(problem).__name__}: {problem}") from None
        pieces: list[Piece] = []
        for index, stretch in enumerate(self._whole.split(text)):
            pieces += [Control(stretch)] if index % 2 else _plain(stretch.replace(mark, ""), hole, given)
        return pieces

    def _unused(self, texts: Sequence[str]) -> tuple[str, str]:
        """Two characters that occur in no text, nor in the template."""
        taken = set(self._source).union(*texts)
        free = [chr(code) for code in PRIVATE_USE if chr(code) not in taken]
        if len(free) < 2:
            raise ChatTemplateError(
                "the conversation holds every private-use character: there is none left to mark with"
            )
        return free[0], free[1]

    def _marked(self, text: str, mark: str) -> str:
        """No control token in it is whole any more, nor becomes so by what the template puts before or after it."""
        inside = "".join(
            text[start:end] + mark * (end < len(text))
            for start, end in _stretches([found.start() + 1 for found in self._starts.finditer(text)], len(text))
        )
        touches = any(
            text in control
            or any(text.endswith(control[:size]) or text.startswith(control[-size:]) for size in range(1, len(control)))
            for control in self._controls
        )
        return f"{mark}{inside}{mark}" if touches and text else inside


def _stretches(cuts: Sequence[int], length: int) -> list[tuple[int, int]]:
    """`(start, end)` of what lies between the cuts."""
    return list(zip([0, *cuts], [*cuts, length], strict=True))


def _plain(text: str, hole: str, given: Sequence[tuple[int, ...]]) -> list[Piece]:
    """Text, and in the place of holes the token ids."""
    pieces: list[Piece] = []
    for index, stretch in enumerate(re.split(f"{hole}([0-9]+){hole}", text)):
        if index % 2:
            pieces.append(given[int(stretch)])
        elif stretch:
            pieces.append(stretch)
    return pieces


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own would write marks and holes as escapes.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(problem: str) -> NoReturn:
    raise TemplateError(problem)
