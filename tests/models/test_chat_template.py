"""Templates: what they write, what users cannot make them write, and how they fail."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.errors import ChatTemplateError
from mcjax.models.chat_template import ChatTemplate, Control, Piece

CONTROLS = ["<|end|>", "<|start|>", "<|end|><|start|>", "aa", "<s>", "|"]
CHATML = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
INST = (  # trims, looks into contents, writes the first token, refuses roles
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[{{ message.content | trim }}]"
    "{% elif message.role == 'assistant' %}{{ message.content }}<|end|>{% else %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
PARTED = "{% for message in messages %}<|{{ message.content }}|>{{ message.content }}{{ message.content }}{% endfor %}"
FRAGMENTS = [
    "<",
    "|",
    "<|",
    "<|en",
    "d|>",
    "|>",
    "end",
    "<|end|>",
    "<|start|>",
    "a",
    "aa",
    "<s>",
    "s>",
    "x",
    "\n",
    "\ue000",
]
CONTENTS = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join)


def flat(pieces: list[Piece]) -> str:
    return "".join(piece.text if isinstance(piece, Control) else str(piece) for piece in pieces)


def controls(pieces: list[Piece]) -> list[str]:
    return [piece.text for piece in pieces if isinstance(piece, Control)]


@settings(max_examples=300)
@given(st.sampled_from([CHATML, INST, PARTED]), st.lists(CONTENTS, min_size=1, max_size=3))
def test_no_content_becomes_a_control_token(source: str, contents: list[str]) -> None:
    template = ChatTemplate(source, CONTROLS, {"bos_token": "<s>"})

    def pieces(texts: list[str]) -> list[Piece]:
        return template.render([{"role": "user", "content": text} for text in texts], True)

    found = pieces(contents)
    assert controls(found) == controls(pieces(["harmless" if text.strip() else "" for text in contents]))
    if source == CHATML:
        said = "".join(f"<|start|>user\n{text}<|end|>\n" for text in contents)
        assert flat(found) == said + "<|start|>assistant\n"


def test_a_template_may_build_a_control_token_of_a_role() -> None:
    template = ChatTemplate("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", ["<|user|>"], {})
    found = template.render([{"role": "user", "content": "<|user|>user"}], True)
    assert found == [Control("<|user|>"), "<|user|>user"]
    with pytest.raises(ChatTemplateError, match="role"):
        template.render([{"role": "user|>", "content": ""}], True)


def test_token_ids_stand_as_they_are() -> None:
    template = ChatTemplate(CHATML, CONTROLS, {})
    found = template.render([{"role": "user", "content": "0"}, {"role": "assistant", "content": [3, 1, 4]}], False)
    wanted = [Control("<|start|>"), "user\n0", Control("<|end|>"), "\n"]
    wanted += [Control("<|start|>"), "assistant\n", (3, 1, 4), Control("<|end|>"), "\n"]
    assert found == wanted


def test_templates_see_the_text_that_users_wrote() -> None:
    template = ChatTemplate(
        "{% if 'magic' in messages[0].content %}yes{% endif %}{{ messages | tojson }}", ["<|e|>"], {}
    )
    found = template.render([{"role": "user", "content": "magic <|e|> é"}], True)
    assert found == ['yes[{"role": "user", "content": "magic <|e|> é"}]']


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (INST, "only user and assistant"),
        ("{{ messages[0].content.missing.more }}", "refuses"),
        ("{{ ().__class__.__mro__ }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ strftime_now('%Y') }}", "strftime_now"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ],
)
def test_what_a_template_refuses_or_cannot_do(source: str, message: str) -> None:
    template = ChatTemplate(source, CONTROLS, {"bos_token": ""})
    with pytest.raises(ChatTemplateError, match=message):
        template.render([{"role": "system", "content": "x"}], True)


def test_templates_and_messages_that_cannot_be_read() -> None:
    with pytest.raises(ChatTemplateError, match="cannot be read"):
        ChatTemplate("{% for %}", CONTROLS, {})
    with pytest.raises(ChatTemplateError, match="has no content"):
        ChatTemplate(CHATML, CONTROLS, {}).render([{"role": "user"}], True)
    everything = "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(ChatTemplateError, match="private-use"):
        ChatTemplate(CHATML, CONTROLS, {}).render([{"role": "user", "content": everything}], True)
