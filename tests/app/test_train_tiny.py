"""`mcjax train-tiny`: what it cannot do."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mcjax.app import train_tiny
from mcjax.models.training import text as texts


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of a few words."""
    said = np.frombuffer(b"the statement is used to do what the statement says; " * 20, np.uint8).astype(np.int32)
    text = texts.Corpus(said, said[:65], 65, {"some.py": "0" * 8})
    monkeypatch.setattr(texts, "corpus", lambda: text)


@pytest.mark.parametrize(("option", "value"), [("--steps", "0"), ("--minutes", "0"), ("--minutes", "nan")])
def test_limits_that_leave_nothing(option: str, value: str, small: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_tiny.command([option, value]) == 2
    assert re.search(rf"mcjax: {option}=\S+: must be positive", capsys.readouterr().err)
