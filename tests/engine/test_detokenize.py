"""Streamed text against decoding the whole: any bytes, any cuts, stop strings across borders and inside each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mcjax.engine.detokenize import TextStream
from mcjax.models.byte_tokenizer import ByteTokenizer


class Chunks:
    """A tokenizer whose token i stands for the i-th of some byte strings."""

    def __init__(self, pieces: list[bytes]):
        self.pieces = pieces
        self.vocab_size = len(pieces)
        self.end_tokens = ()

    def encode(self, text):
        raise NotImplementedError

    def apply_chat_template(self, messages, add_generation_prompt=True):
        raise NotImplementedError

    def decode(self, tokens):
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", "replace")

    def token_bytes(self, token):
        return self.pieces[token]


def first_stop(text: str, stops: list[str], counts: Callable[[int], bool]) -> tuple[int, int] | None:
    """(end, start) of the first stop string to be complete, from a look at every place; of ends that count."""
    places = [(end, start) for end in range(len(text) + 1) for start in range(end) if text[start:end] in stops]
    return min((place for place in places if counts(place[0])), default=None)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({at % (len(data) + 1) for at in cuts} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


TEXTS = st.text(st.sampled_from("ab é漢🙂\ufffd\n"), max_size=24)
NOISE = st.lists(
    st.sampled_from([b"a", b"b", b"\xf0\x9f", b"\x99", b"\x82", b"\xc3", b"\xff", b"\xe6\xbc"]), max_size=16
)


@given(st.one_of(TEXTS.map(str.encode), NOISE.map(b"".join), st.binary(max_size=16)), st.lists(st.integers(0, 99)))
@example("🙂".encode(), [1, 2, 3])
@example(b"\xf0\x9f\x99", [1])
@example(b"\xe6\xbca", [1, 2])
def test_joined_pieces_are_the_whole_text_and_no_half_character_is_shown(data: bytes, cuts: list[int]) -> None:
    tokenizer = Chunks(cut(data, cuts))
    stream, sent = TextStream(tokenizer), ""
    for token in range(tokenizer.vocab_size):
        sent += stream.push([token])
        so_far = b"".join(tokenizer.pieces[: token + 1])
        # What is certain whatever follows: all but an unfinished character at the end.
        certain = so_far.decode("utf-8", "replace")
        assert certain.startswith(sent)
        assert len(certain) - len(sent) <= 1
        if so_far.decode("utf-8", "ignore") == certain:
            assert sent == certain, "whole characters are not held back"
    assert sent + stream.finish() == data.decode("utf-8", "replace")
    assert stream.stop is None
    assert stream.stopped_after is None


@given(
    st.text(st.sampled_from("ab🙂"), max_size=20),
    st.lists(st.text(st.sampled_from("ab🙂"), min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, 99)),
    st.sampled_from([0, 0, 1, 2, 4]),
)
@example("aab", ["ab", "aab"], [1, 2], 0)
@example("abab", ["abb", "ba"], [2], 0)
@example("xaaab", ["aab", "a🙂"], [1, 2, 3], 0)
@example("abab", ["a", "bab"], [1, 2, 3], 4)
@example("bbaa", ["a", "bbab"], [1, 2, 3], 4)
def test_stop_strings_wherever_tokens_end(text: str, stops: list[str], cuts: list[int], min_tokens: int) -> None:
    tokenizer = Chunks(cut(text.encode(), cuts))
    ends = [len(b"".join(tokenizer.pieces[: count + 1])) for count in range(tokenizer.vocab_size)]

    def completes(end: int) -> int:
        """With how many tokens the text is there up to `end`."""
        return next(count for count, size in enumerate(ends, start=1) if size >= len(text[:end].encode()))

    stream = TextStream(tokenizer, stops, min_tokens)
    sent = stream.push(range(tokenizer.vocab_size)) + stream.finish()
    found = first_stop(text, stops, lambda end: completes(end) >= min_tokens)
    if found is None:
        assert (sent, stream.stop, stream.stopped_after) == (text, None, None)
        return
    end, start = found
    assert sent == text[:start]
    assert stream.stop == text[start:end]
    assert stream.stopped_after == completes(end)


@given(
    st.text(st.sampled_from("ab🙂"), max_size=20),
    st.lists(st.text(st.sampled_from("ab🙂"), min_size=1, max_size=4), max_size=3),
)
def test_what_is_held_back_may_become_a_stop_string_and_nothing_else_is(text: str, stops: list[str]) -> None:
    stream, sent = TextStream(ByteTokenizer(), stops), ""
    for byte in text.encode():
        before, sent = sent, sent + stream.push([byte])
        if stream.stop is not None:
            break
        assert text.startswith(sent)
        assert sent.startswith(before)
    else:
        held = stream.finish()
        assert sent + held == text
        assert not held or any(stop.startswith(held) for stop in stops)


def test_after_a_stop_nothing_counts() -> None:
    stream = TextStream(ByteTokenizer(), ["\n\n", "END"])
    assert stream.push(b"one EN") == "one "
    assert stream.push(b"d\n") == "ENd"
    assert stream.push(b"EN") == "\n"
    assert stream.push(b"D and more") == ""
    assert (stream.stop, stream.stopped_after) == ("END", 11)
    assert stream.push(b"\n\n") == ""
    assert stream.finish() == ""
    assert stream.stopped_after == 11


def test_control_tokens_show_nothing_and_split_nothing() -> None:
    stream = TextStream(ByteTokenizer(), ["stop"])
    assert stream.push([0xC3]) == ""
    assert stream.push([ByteTokenizer.end, 0xA9]) == "é"
    assert stream.push([*b"st", ByteTokenizer.padding, *b"op"]) == ""
    assert stream.stopped_after == 8


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        TextStream(ByteTokenizer(), ["a", ""])


def test_the_work_of_a_token_does_not_grow_with_the_output() -> None:
    """Counted, not timed: bytes asked for a token, and characters kept, after many tokens that never settle."""

    class Counting(ByteTokenizer):
        asked = 0

        def token_bytes(self, token):
            self.asked += 1
            return super().token_bytes(token)

    tokenizer = Counting()
    stream = TextStream(tokenizer, ["a" * 10 + "b"])
    for _ in range(2000):
        stream.push([ord("a"), 0xE6])  # every token may still become something else
    assert tokenizer.asked == 4000
    assert len(stream._held) <= 10
