"""Tokenizers of model directories: control tokens from the template alone, ends as configs say, transformers' ids."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import directory_fixtures as small
from mcjax.cost.catalogue import model
from mcjax.errors import ChatTemplateError, ConfigError
from mcjax.models.checkpoint import locate
from mcjax.models.directory_tokenizer import DirectoryTokenizer
from mcjax.models.tokenizer import from_checkpoint

KINDS = ("letters", "pieces", "prepended")
QUESTION: list[Any] = [{"role": "user", "content": "hello, <|end|> world<|late|>"}]


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: small.write_tokenizer(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(scope="session")
def tokenizers(directories: dict[str, Path]) -> dict[str, DirectoryTokenizer]:
    return {kind: DirectoryTokenizer(path) for kind, path in directories.items()}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100)
@given(text=st.text(st.sampled_from("helo wrd,.é\n🙂<|>"), max_size=30))
def test_text_comes_back(tokenizers: dict[str, DirectoryTokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    # Some put a space of their own before a text.
    begun = " " if (kind == "prepended" and text) or (kind == "pieces" and text and text[0] != " ") else ""
    assert tokenizer.decode(tokenizer.encode(text)) == begun + text


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_becomes_a_control_token(directories: dict[str, Path], kind: str) -> None:
    tokenizer = DirectoryTokenizer(directories[kind])
    vocabulary = json.loads((directories[kind] / "tokenizer.json").read_text())
    controls = {token["id"] for token in vocabulary["added_tokens"] if token["special"]}
    spelled = "hell<|start|>o<|end|><|late|><unk>"
    assert controls.isdisjoint(tokenizer.encode(spelled))
    assert tokenizer.decode(tokenizer.encode(spelled)).strip() == spelled
    ids = tokenizer.apply_chat_template(QUESTION)
    assert [index for index in ids if index in controls] == [1, 1, 0, 1]
    assert tokenizer.decode(ids).replace(" ", "") == "user\nhello,<|end|>world<|late|>\nassistant\n"


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_are_added_as_text_keep_their_ids(directories: dict[str, Path], kind: str) -> None:
    tokenizer = DirectoryTokenizer(directories[kind])
    whole = Tokenizer.from_file(str(directories[kind] / "tokenizer.json"))
    (think,) = [token["id"] for token in small.tokenizer(kind)["added_tokens"] if token["content"] == "<think>"]
    assert tokenizer.encode("hell<think>o") == whole.encode("hell<think>o", add_special_tokens=False).ids
    assert think in tokenizer.encode("hell<think>o")
    assert tokenizer.token_bytes(think) == b"<think>"
    assert tokenizer.vocab_size == think + 1
    with pytest.raises(ValueError, match="outside"):
        tokenizer.token_bytes(think + 1)


def test_answers_end_as_the_configs_say(tmp_path: Path) -> None:
    path = small.write_tokenizer(tmp_path)
    assert DirectoryTokenizer(path).end_tokens == (0,)
    late = len(small.tokenizer()["model"]["vocab"])
    (path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [late, 0]}}))
    assert DirectoryTokenizer(path).end_tokens == (late, 0)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": late}))
    assert DirectoryTokenizer(path).end_tokens == (late,)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [late, 9999]}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: its eos_token_id 9999 is no token"):
        DirectoryTokenizer(path)


def test_templates_lie_in_several_places(tmp_path: Path) -> None:
    def chat(path: Path) -> str:
        return DirectoryTokenizer(path).decode(DirectoryTokenizer(path).apply_chat_template(QUESTION[:1]))

    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    path = small.write_tokenizer(tmp_path, chat_template=named)
    assert chat(path) == "yes"
    (path / "chat_template.jinja").write_text("file{{ eos_token }}")
    assert chat(path) == "file"
    path = small.write_tokenizer(tmp_path / "none", chat_template=None)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        chat(path)
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    assert chat(path) == "old"


def put(content: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The same with another value at a dotted key."""
    first, _, rest = key.partition(".")
    return {**content, first: put(content[first], rest, value) if rest else value}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.type", "Unigram", "its model is of kind Unigram; allowed: BPE"),
        ("model.vocab", [1], "has no vocabulary"),
        ("model.vocab", {"a": -1}, "'a' has no id, or -1"),
        ("model.vocab", {"a": 10**12}, "'a' has no id, or 1000000000000"),
        ("model.merges", ["q qqq"], "no tokenizer that can be read"),
        ("added_tokens", [{"id": 1}], "added token without content"),
        ("decoder", {"type": "WordPiece"}, "its decoder is of kind"),
        ("pre_tokenizer", {"type": "Magic"}, "no tokenizer that can be read"),
    ],
)  # fmt: skip
def test_tokenizers_that_are_not_ours_are_refused(tmp_path: Path, key: str, value: Any, message: str) -> None:
    path = small.write_tokenizer(tmp_path)
    (path / "tokenizer.json").write_text(json.dumps(put(small.tokenizer(), key, value)))
    with pytest.raises(ConfigError, match=message):
        DirectoryTokenizer(path)


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json, which text needs$"):
        from_checkpoint(str(tmp_path), 300)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ConfigError, match=r"transformers makes one of tokenizer\.model"):
        from_checkpoint(str(tmp_path), 300)
    small.write_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.vocab=200: the tokenizer of .* has 26\d tokens"):
        from_checkpoint(str(tmp_path), 200)
    tokenizer = from_checkpoint(str(tmp_path), 300)
    assert (tokenizer.vocab_size, tokenizer.token_bytes(299)) == (300, b"")  # the model may know more ids
    content = (tmp_path / "tokenizer.json").read_bytes()
    for size in range(0, len(content), 997):
        (tmp_path / "tokenizer.json").write_bytes(content[:size])
        with pytest.raises(ConfigError, match=r"tokenizer\.json: is no JSON"):
            from_checkpoint(str(tmp_path), 300)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_bytes_never_end_in_another_error(directories: dict[str, Path], data: st.DataObject) -> None:
    path = directories["letters"].parent / "damaged"
    small.write_tokenizer(path)
    file = path / data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    with contextlib.suppress(ConfigError, ChatTemplateError):
        DirectoryTokenizer(path).apply_chat_template(QUESTION)


def test_tokenizers_of_directories_need_no_jax() -> None:
    code = "import sys, mcjax.models.directory_tokenizer, mcjax.models.digests; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CHARACTERS = "abc helo w \n\t12390éß漢字🙂'’.,;-\x00\x7f\u00a0٣<|>im_endthik'll▁"  # noqa: RUF001


@pytest.fixture(scope="session")
def pairs(directories: dict[str, Path], smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Ours and transformers', by kind; `smollm2` as transformers saves what it reads of the GGUF file."""
    from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

    path = locate(model(smollm2).checkpoint)
    saved = tmp_path_factory.mktemp("smollm2")
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(saved)
    found = {**directories, "smollm2": saved}
    return {kind: (DirectoryTokenizer(at), AutoTokenizer.from_pretrained(at)) for kind, at in found.items()}


def without_first_space(kind: str, text: str) -> str:
    """Llama 2's decoder takes it away, which nobody can do who gives tokens out one by one."""
    return text.removeprefix(" ") if kind == "prepended" else text


ALL = pytest.mark.parametrize("kind", [*KINDS, "smollm2"])


@pytest.mark.parity
@ALL
@settings(max_examples=500, deadline=None)
@given(text=st.one_of(st.text(st.sampled_from(CHARACTERS), max_size=40), st.text(max_size=20)))
def test_ids_equal_those_of_transformers(pairs: dict[str, Any], kind: str, text: str) -> None:
    ours, theirs = pairs[kind]
    ids = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert ours.encode(text) == ids
    assert without_first_space(kind, ours.decode(ids)) == theirs.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parity
@ALL
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_texts_of_any_ids_equal_those_of_transformers(pairs: dict[str, Any], kind: str, data: st.DataObject) -> None:
    ours, theirs = pairs[kind]
    # A run of bytes that is no UTF-8 as a whole they make U+FFFD of, byte by byte; we keep what of it is.
    known = sorted(index for text, index in theirs.get_vocab().items() if not text.startswith("<0x"))
    ids = data.draw(st.lists(st.sampled_from(known), max_size=20))
    wanted = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert without_first_space(kind, ours.decode(ids)) == wanted


@pytest.mark.parity
@ALL
@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.text(st.sampled_from("ab 1\n.é"), max_size=12), min_size=1, max_size=4), ask=st.booleans())
def test_chats_equal_those_of_transformers(pairs: dict[str, Any], kind: str, texts: list[str], ask: bool) -> None:
    ours, theirs = pairs[kind]
    roles = ["user", "assistant"] * 2
    messages: list[Any] = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    assert ours.apply_chat_template(messages, ask) == theirs.apply_chat_template(
        messages, add_generation_prompt=ask, return_dict=False
    )
    assert set(ours.end_tokens) == {theirs.eos_token_id}
