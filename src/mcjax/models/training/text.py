"""The text that the built-in models learn: documentation that every CPython ships, under the PSF licence. Free of jax.

Help topics of `pydoc_data` are documents; docstrings of the standard library are answers in chats, so that the tokens
that open, close and frame a text mean something to the model. Files are parsed and never imported, in the order of
their names. A documented paragraph counts once, however often it is repeated: else what is held out would be learnt.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.models.byte_tokenizer import ByteTokenizer

LICENCE = "Python Software Foundation License Version 2"
LEFT_OUT = frozenset(
    "aifc antigravity asynchat asyncore cgi cgitb chunk crypt distutils ensurepip idlelib imghdr imp lib2to3 mailcap"
    " msilib nntplib pipes pydoc_data site-packages smtpd sndhdr sunau telnetlib test this tkinter turtle turtledemo"
    " uu xdrlib".split()
)
"""What some installations leave out (Tk, tests), and what releases after 3.11 no longer have."""
HELD_OUT_OF = 20
"""One document in so many is held out, by a hash of its name."""
COUNTED = 40
"""Shorter paragraphs may repeat: headings, signatures."""


@dataclass(frozen=True, slots=True)
class Document:
    """`part` is the file that it comes from; `turns` are questions with answers, or one text without a question."""

    part: str
    name: str
    turns: tuple[tuple[str, str], ...]

    @property
    def held_out(self) -> bool:
        return int.from_bytes(self.order[:4], "big") % HELD_OUT_OF == 0

    @property
    def order(self) -> bytes:
        return hashlib.sha256(f"{self.part}/{self.name}".encode()).digest()

    def tokens(self) -> list[int]:
        """Begin; the text, or the chat as the template has it; end."""
        tokenizer = ByteTokenizer()
        ids = [tokenizer.begin]
        for turn, (question, text) in enumerate(self.turns):
            if question:
                ids += tokenizer.encode("\n") if turn else []
                ids += tokenizer.apply_chat_template([{"role": "user", "content": question}])
            ids += [*tokenizer.encode(f" {text}" if question else text), tokenizer.end]
        return ids


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens of all documents behind each other, and where they came from."""

    training: NDArray[np.int32]
    held_out: NDArray[np.int32]
    held_out_bytes: int
    """Bytes of text in `held_out`: its tokens but the control tokens."""
    parts: dict[str, str]
    """File -> 8 hex digits of the sha256 of what was taken from it."""

    @property
    def digest(self) -> str:
        """Hex sha256 of all tokens."""
        return hashlib.sha256(self.training.tobytes() + self.held_out.tobytes()).hexdigest()

    def differences(self, parts: dict[str, str]) -> list[str]:
        """Files of which another corpus took something else, or that only one of both has."""
        return sorted(name for name in {*parts, *self.parts} if parts.get(name) != self.parts.get(name))


def corpus(library: Path | None = None, limit_documents: int | None = None) -> Corpus:
    """The text of this Python's standard library (or of that in `library`).

    Held-out documents are read first, and their paragraphs left out of the others. Both sides are put into an order
    of their own by a hash of their names, so that neighbours in the stream have nothing to do with each other.
    """
    found = sorted(documents(library or Path(sysconfig.get_path("stdlib"))), key=lambda document: document.order)
    found = found[:limit_documents]
    parts: dict[str, Any] = {}
    for document in sorted(found, key=lambda document: (document.part, document.name)):
        parts.setdefault(document.part, hashlib.sha256()).update(repr(document.turns).encode())
    seen: set[str] = set()
    sides: dict[bool, list[int]] = {True: [], False: []}
    for held_out in (True, False):
        for document in found:
            if document.held_out == held_out:
                turns = [(question, _unseen(text, seen)) for question, text in document.turns]
                if any(text for _, text in turns):
                    kept = replace(document, turns=tuple(turn for turn in turns if turn[1]))
                    sides[held_out] += kept.tokens()
    held = np.array(sides[True], np.int32)
    digests = {part: digest.hexdigest()[:8] for part, digest in parts.items()}
    return Corpus(np.array(sides[False], np.int32), held, int((held < 256).sum()), digests)


def _unseen(text: str, seen: set[str]) -> str:
    """The paragraphs of `text` that are not in `seen`, which grows by them."""
    kept: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        same = " ".join(paragraph.split())
        if same in seen:
            continue
        if len(same) >= COUNTED:
            seen.add(same)
        kept.append(paragraph)
    return "\n\n".join(kept) if any(len(paragraph) >= COUNTED for paragraph in kept) else ""


def documents(library: Path) -> Iterator[Document]:
    """Help topics one by one; modules, functions and classes with their methods, as far as they are documented."""
    topics = library / "pydoc_data" / "topics.py"
    if topics.is_file():
        for node in ast.walk(_parsed(topics)):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                        yield Document("pydoc_data/topics.py", str(key.value), (("", str(value.value).strip()),))
    for file in sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).parts):
        path = file.relative_to(library)
        folders = {part.removesuffix(".py") for part in path.parts}
        if folders & (LEFT_OUT | {"tests", "__pycache__"}) or path.parts[0].startswith("_sysconfigdata"):
            continue
        module, tree = ".".join(path.with_suffix("").parts).removesuffix(".__init__"), _parsed(file)
        if turns := _turns(tree, module, whole=False):
            yield Document(path.as_posix(), "", turns)
        for node in tree.body:
            if isinstance(node, _DOCUMENTED) and (turns := _turns(node, f"{module}.{node.name}", whole=True)):
                yield Document(path.as_posix(), node.name, turns)


_DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _parsed(file: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes in strings
        try:
            return ast.parse(file.read_bytes())
        except (SyntaxError, OSError):  # another version's library
            return ast.Module([], [])


def _turns(node: Any, name: str, whole: bool) -> tuple[tuple[str, str], ...]:
    """What `name` is, and then (`whole`) what is defined inside."""
    text = ast.get_docstring(node)
    turns = ((f"What is {name}?", text),) if text and len(text) >= COUNTED else ()
    inner = [child for child in node.body if whole and isinstance(child, _DOCUMENTED)]
    return sum((_turns(child, f"{name}.{child.name}", whole) for child in inner), turns)
