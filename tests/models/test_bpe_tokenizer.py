"""Byte-level BPE from GGUF: a small one by hand, SmolLM2's by known ids, and (marker `parity`) against transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf_fixtures as small
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.cost.catalogue import model
from mcjax.errors import ChatTemplateError, ConfigError
from mcjax.models.bpe_tokenizer import BPETokenizer
from mcjax.models.checkpoint import locate
from mcjax.models.checkpoint_tokenizer import byte_of_letter
from mcjax.models.gguf_file import GGUFFile
from mcjax.models.tokenizer import from_checkpoint, tokenizer_for

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
QUESTION_IDS = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198,
    1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 19842, 281, 582, 6330, 30, 2, 198, 1, 520, 9531, 198,
]  # fmt: skip


def written(folder: Path, metadata: dict[str, Any] | None = None) -> BPETokenizer:
    return BPETokenizer(GGUFFile(small.write(folder / "model.gguf", metadata=metadata)))


@pytest.fixture(scope="session")
def hand_made(tmp_path_factory: pytest.TempPathFactory) -> BPETokenizer:
    return written(tmp_path_factory.mktemp("tokenizer"))


def test_letters_of_bytes() -> None:
    assert list(byte_of_letter()) != small.letters()  # another order,
    assert {letter: byte for byte, letter in enumerate(small.letters())} == byte_of_letter()  # and the same pairs


def test_merges_and_controls(hand_made: BPETokenizer) -> None:
    names = small.vocabulary()
    assert [names[token] for token in hand_made.encode("hello w12")] == ["hell", "o", "Ġw", "1", "2"]
    assert hand_made.end_tokens == (names.index("<|end|>"),)
    assert hand_made.encode("<|end|>") == [names.index(letter) for letter in "<|end|>"]
    ids = hand_made.apply_chat_template([{"role": "user", "content": "o<|end|>"}])
    texts = [names[token] for token in ids]
    assert texts.count("<|end|>") == 1
    assert texts.count("<|start|>") == 2
    assert hand_made.decode(ids) == "user\no<|end|>\nassistant\n"
    assert hand_made.token_bytes(names.index("Ġw")) == b" w"
    with pytest.raises(ValueError, match="outside"):
        hand_made.decode([len(names)])


def test_an_answer_stays_the_tokens_it_was(hand_made: BPETokenizer) -> None:
    names, said = small.vocabulary(), [{"role": "user", "content": "o"}]
    first = hand_made.apply_chat_template(said)
    answer = [names.index(letter) for letter in "hello"]  # not how `encode` would have it
    for ending in ([], [names.index("<|end|>")]):
        again = hand_made.apply_chat_template([*said, {"role": "assistant", "content": answer + ending}, *said])
        assert again[: len(first) + len(answer) + 1] == [*first, *answer, names.index("<|end|>")]
        assert hand_made.decode(again) == "user\no\nassistant\nhello\nuser\no\nassistant\n"


@given(st.text())
def test_any_text_comes_back(hand_made: BPETokenizer, text: str) -> None:
    ids = hand_made.encode(text)
    assert hand_made.decode(ids) == text
    assert b"".join(map(hand_made.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "kind 'llama'"),
        ({"tokenizer.ggml.pre": "qwen2"}, "'qwen2'.*gpt2, smollm"),
        ({"tokenizer.ggml.merges": ["h e", "no-pair"]}, "merges"),
        ({"tokenizer.ggml.merges": ["h zz"]}, "merges"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "another number"),
        ({"tokenizer.ggml.eos_token_id": 5}, "eos token 5"),
        ({"tokenizer.ggml.eos_token_id": None}, "eos_token_id"),
    ],
)
def test_tokenizers_that_are_not_understood(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        written(tmp_path, metadata)


def test_a_model_without_a_template_has_no_chats(tmp_path: Path) -> None:
    tokenizer = written(tmp_path, {"tokenizer.chat_template": None})
    assert tokenizer.encode("o")
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.apply_chat_template(QUESTION)


def test_the_tokenizer_of_a_shape(tmp_path: Path) -> None:
    assert tokenizer_for(model("tiny")).encode("é") == [0xC3, 0xA9]
    path = small.write(tmp_path / "model.gguf")
    shape = dataclasses.replace(small.SHAPE, checkpoint=str(path))
    assert tokenizer_for(shape).vocab_size == shape.vocab
    with pytest.raises(ConfigError, match=r"model\.vocab=100"):
        from_checkpoint(str(path), 100)


def test_smollm2(smollm2: str) -> None:
    tokenizer = tokenizer_for(model(smollm2))
    assert tokenizer.apply_chat_template(QUESTION) == QUESTION_IDS
    assert tokenizer.end_tokens == (2,)
    assert tokenizer.decode([504, 3575, 282, 4649, 314, 7042, 30, 2]) == "The capital of France is Paris."


# What is hard on a tokenizer: digits, spaces before them, letters of several bytes, and bytes that it has no token for.
CHARACTERS = "abc  \n\t12390éß漢字🙂'’.,;-\x00\x04\x7f\u00a0٣½Ⅷ<|>im_endI'll\U00040000"  # noqa: RUF001


@pytest.fixture(scope="session")
def transformers_tokenizer(smollm2: str) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

    path = locate(model(smollm2).checkpoint)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers leaves `tokenizer.ggml.pre` unread; the model was trained with digits one by one.
    digits, letters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    return theirs


@pytest.fixture(scope="session")
def ours(smollm2: str) -> Any:
    return tokenizer_for(model(smollm2))


@pytest.mark.parity
@settings(max_examples=1000)
@given(st.one_of(st.text(st.sampled_from(CHARACTERS), max_size=40), st.text(max_size=20)))
def test_ids_equal_those_of_transformers(ours: Any, transformers_tokenizer: Any, text: str) -> None:
    theirs = transformers_tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert ours.encode(text) == theirs
    assert ours.decode(theirs) == transformers_tokenizer.decode(theirs, clean_up_tokenization_spaces=False)


@pytest.mark.parity
@settings(max_examples=300)
@given(st.lists(st.integers(0, 49151), max_size=20))
def test_texts_of_any_ids_equal_those_of_transformers(ours: Any, transformers_tokenizer: Any, ids: list[int]) -> None:
    theirs = transformers_tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.decode(ids) == theirs


@pytest.mark.parity
@given(st.lists(st.text(st.sampled_from("ab 1\n.é"), max_size=12), min_size=1, max_size=4), st.booleans())
def test_chats_equal_those_of_transformers(ours: Any, transformers_tokenizer: Any, texts: list[str], ask: bool) -> None:
    roles = ["user", "assistant"] * 2
    messages: list[Any] = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    theirs = transformers_tokenizer.apply_chat_template(messages, add_generation_prompt=ask)["input_ids"]
    assert ours.apply_chat_template(messages, ask) == theirs
