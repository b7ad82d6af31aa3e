from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.errors import ChatTemplateError
from mcjax.models.byte_tokenizer import ByteTokenizer


@settings(max_examples=50)
@given(st.text())
def test_any_text_comes_back(text):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert all(0 <= token < 256 for token in tokens)


def test_special_tokens_are_left_out_and_broken_bytes_shown():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([tokenizer.begin, 104, 105, tokenizer.end, tokenizer.padding]) == "hi"
    assert tokenizer.decode([0xC3]) == "\ufffd"
    with pytest.raises(ValueError, match="259"):
        tokenizer.decode([259])


def test_chats_are_lines_closed_by_the_end_token():
    tokenizer = ByteTokenizer()
    end, said = tokenizer.end, [{"role": "user", "content": "hi"}]
    first = tokenizer.apply_chat_template(said)
    assert first == [*b"User: hi", end, *b"\nAssistant:"]
    answer = [*b" ho", end]
    again = tokenizer.apply_chat_template([*said, {"role": "assistant", "content": answer}, *said])
    assert again == [*first, *answer, *b"\n", *first]
    cut_off = tokenizer.apply_chat_template([*said, {"role": "assistant", "content": [*b" h"]}], False)
    assert cut_off == [*first, *b" h", end, *b"\n"]
    with pytest.raises(ChatTemplateError, match="role"):
        tokenizer.apply_chat_template([{"content": "hi"}])


def test_half_a_surrogate_pair_is_no_text():
    assert ByteTokenizer().encode("a\ud83d") == [*b"a?"]


def test_it_needs_no_jax():
    code = "import sys, mcjax.models.byte_tokenizer; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
