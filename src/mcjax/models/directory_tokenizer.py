"""The tokenizer of a Hugging Face model directory, as `tokenizers` computes it. Free of jax."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from mcjax.errors import ConfigError
from mcjax.models.chat_template import ChatTemplate
from mcjax.models.checkpoint import KEY
from mcjax.models.checkpoint_tokenizer import NO_TEMPLATE, CheckpointTokenizer, Vocabulary, bytes_of_letters
from mcjax.models.directory_json import read_object, read_text

TOKENIZER = "tokenizer.json"
MOST_IDS = 1 << 24
"""More than any vocabulary has: a file that says otherwise is damaged."""
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class DirectoryTokenizer(CheckpointTokenizer):
    """`tokenizer.json`, with the template, special tokens and end tokens of the files beside it.

    Special tokens are control tokens: they are taken out of what `encode` works with, and so is what would be put
    around every text. Of tokens with which an answer ends `generation_config.json` has the last word, then
    `config.json`, then the tokenizer. Raises `ConfigError` for files that are not there, damaged, or at odds.

    `vocab`: of the model, which may know more ids than the tokenizer has tokens; those add nothing to a text.
    """

    def __init__(self, path: Path, vocab: int = 0):
        file = path / TOKENIZER
        if not file.exists():
            problem = f"has no {TOKENIZER}, which text needs"
            if (path / "tokenizer.model").exists():
                problem += "; transformers makes one of tokenizer.model: AutoTokenizer.from_pretrained, save_pretrained"
            raise ConfigError(KEY, path, problem)
        content = read_object(file)
        known = dict(_tokens(file, content))
        added = [_added(file, each) for each in _list(content.get("added_tokens"))]
        known |= {text: index for text, index, _ in added}
        controls = {text: index for text, index, fields in added if fields.get("special")}
        said = read_object(path / "tokenizer_config.json", optional=True)
        special = {name: text for name in NAMED if (text := _text_of(said.get(name))) is not None}
        ends = _ends(path, known, special.get("eos_token"))
        texts: list[str | None] = [None] * max(vocab, max(known.values(), default=-1) + 1)
        for text, index in known.items():
            texts[index] = text
        controls |= {str(texts[index]): index for index in ends}
        super().__init__(
            Vocabulary(
                texts,
                controls,
                _as_bytes(file, content, {text for text, *_ in added}),
                frozenset(text for text, _, fields in added if fields.get("lstrip")),
                frozenset(text for text, _, fields in added if fields.get("rstrip")),
            ),
            _encoder(file, _plain(content, controls)),
            ChatTemplate(_template(path, said), controls, special),
            ends,
            _later(file, content, controls),
        )


def _plain(content: dict[str, Any], controls: dict[str, int]) -> dict[str, Any]:
    """A tokenizer without control tokens, which puts nothing around a text."""
    model = cast("dict[str, Any]", content["model"])
    unknown = model.get("unk_token")
    added = [each for each in _list(content.get("added_tokens")) if each["content"] not in controls]
    words = {
        text: index
        for text, index in cast("dict[str, int]", model["vocab"]).items()
        if text == unknown or text not in controls  # what stands for unknown characters stays: no merge leads to it
    }
    # The library numbers added tokens itself where the vocabulary does not have them.
    words |= {each["content"]: each["id"] for each in added}
    model = {**model, "vocab": words}
    nothing = dict.fromkeys(("post_processor", "truncation", "padding"))
    return {**content, **nothing, "model": model, "added_tokens": added}


def _later(file: Path, content: dict[str, Any], controls: dict[str, int]) -> Callable[[str], list[int]] | None:
    """For text behind a control token, of tokenizers that begin a text with a space of their own, and only there."""
    splitter: Any = content.get("pre_tokenizer")
    if not isinstance(splitter, dict) or splitter.get("prepend_scheme") != "first":
        return None
    return _encoder(file, _plain({**content, "pre_tokenizer": {**splitter, "prepend_scheme": "never"}}, controls))


def _encoder(file: Path, content: dict[str, Any]) -> Callable[[str], list[int]]:
    try:
        tokenizer = Tokenizer.from_str(json.dumps(content))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as problem:  # the library raises nothing more exact, and panics
        raise ConfigError(KEY, file, f"is no tokenizer that can be read: {str(problem)[:200]}") from None
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def _tokens(file: Path, content: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The model's own tokens."""
    model: Any = content.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    if kind != "BPE":
        raise ConfigError(KEY, file, f"its model is of kind {kind}", ("BPE",))
    words: Any = model.get("vocab")
    if not isinstance(words, dict):
        raise ConfigError(KEY, file, "has no vocabulary")
    for text, index in cast("dict[str, Any]", words).items():
        yield text, _id(file, text, index)


def _added(file: Path, token: Any) -> tuple[str, int, dict[str, Any]]:
    fields = cast("dict[str, Any]", token if isinstance(token, dict) else {})
    text = fields.get("content")
    if not isinstance(text, str) or not text:
        raise ConfigError(KEY, file, "has an added token without content")
    return text, _id(file, text, fields.get("id")), fields


def _id(file: Path, text: str, index: Any) -> int:
    if type(index) is not int or not 0 <= index < MOST_IDS:
        raise ConfigError(KEY, file, f"its token {text[:50]!r} has no id, or {str(index)[:20]}")
    return index


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _text_of(token: Any) -> str | None:
    """A token as configs write it: its text, or an object that has it."""
    if isinstance(token, dict):
        token = cast("dict[str, Any]", token).get("content")
    return token if isinstance(token, str) else None


def _ends(path: Path, known: dict[str, int], eos: str | None) -> list[int]:
    ids = set(known.values())
    for name in ("generation_config.json", "config.json"):
        said = read_object(path / name, optional=True)
        inner = said.get("text_config")
        value = said.get("eos_token_id")
        if value is None and isinstance(inner, dict):
            value = cast("dict[str, Any]", inner).get("eos_token_id")
        if value is None:
            continue
        found = _list(value) if isinstance(value, list) else [value]
        for index in found:
            if type(index) is not int or index not in ids:
                raise ConfigError(KEY, path / name, f"its eos_token_id {index} is no token of {TOKENIZER}")
        if found:
            return list(dict.fromkeys(found))
    if eos is None:
        raise ConfigError(KEY, path, "says nowhere with which token an answer ends: add eos_token_id to config.json")
    if eos not in known:
        raise ConfigError(KEY, path / "tokenizer_config.json", f"its eos_token {eos!r} is no token of {TOKENIZER}")
    return [known[eos]]


def _template(path: Path, said: dict[str, Any]) -> str:
    """The chat template: a file of its own, or in `tokenizer_config.json`, where several have names."""
    if (path / "chat_template.jinja").exists():
        return read_text(path / "chat_template.jinja")
    found = said.get("chat_template")
    if found is None:
        found = read_object(path / "chat_template.json", optional=True).get("chat_template")
    for each in _list(found):
        if isinstance(each, dict) and each.get("name") == "default":
            found = each.get("template")
    if found is None or isinstance(found, str):
        return found or NO_TEMPLATE
    raise ConfigError(KEY, path / "tokenizer_config.json", "its chat_template is no text, and has none named default")


def _as_bytes(file: Path, content: dict[str, Any], added: set[str]) -> Callable[[str], bytes]:
    """How tokens write bytes, which is the business of the tokenizer's decoder."""
    decoder: Any = content.get("decoder")
    steps = [step for step in _steps(decoder) if isinstance(step, dict)]
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        letters = bytes_of_letters()
        return lambda text: text.encode() if text in added else letters(text)
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        spaces = "▁"

        def as_bytes(text: str) -> bytes:
            if text in added:
                return text.encode()
            found = _BYTE.fullmatch(text)
            return bytes([int(found[1], 16)]) if found else text.replace(spaces, " ").encode()

        return as_bytes
    raise ConfigError(KEY, file, f"its decoder is of kind {kinds or None}", ("ByteLevel", "ByteFallback", "Metaspace"))


def _steps(decoder: Any) -> list[Any]:
    if isinstance(decoder, dict) and decoder.get("type") == "Sequence":
        return _list(cast("dict[str, Any]", decoder).get("decoders"))
    return [decoder]
