"""SmolLM2's logits against transformers on torch, from the same file (marker `parity`)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mcjax.cost.catalogue import model
from mcjax.kernels.attention.reference import paged_attention
from mcjax.kernels.xla import WriteThenRead
from mcjax.models import catalogue
from mcjax.models.checkpoint import locate
from mcjax.models.tokenizer import tokenizer_for

pytestmark = [pytest.mark.parity, pytest.mark.timeout(300)]

TEXT = "In a harbour town, 3 boats wait for the tide. Their names are Ada, Grace and Barbara. The largest of them"


def test_logits_of_a_prompt_and_of_its_continuation(smollm2: str) -> None:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    shape = model(smollm2)
    path = locate(shape.checkpoint)
    theirs: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ours = catalogue.load(shape, 0, 128).model
    ids = np.array(tokenizer_for(shape).encode(TEXT), np.int32)
    with torch.no_grad():
        wanted = theirs(torch.tensor(ids[None].astype(np.int64))).logits[0].numpy()
    page_tokens, count = 16, len(ids)
    pages = jnp.zeros((9, *ours.shape.page_shape(page_tokens)))
    table = np.arange(8, dtype=np.int32)[None]
    attend = WriteThenRead(paged_attention, "tokens_first")

    def step(start: int, end: int, pages: Any) -> tuple[Any, Any]:
        positions = np.arange(start, end, dtype=np.int32)[None]
        arrays: list[Any] = [ids[None, start:end], positions, pages, table, np.array([end - start], np.int32)]
        return ours(*arrays, attend=attend)

    for start, end in ((0, count - 2), (count - 2, count - 1), (count - 1, count)):  # the prompt, then token by token
        logits, pages = step(start, end, pages)
        difference = np.abs(np.asarray(logits[0]) - wanted[end - 1])
        assert difference.max() < 2e-3 * np.abs(wanted[end - 1]).max()
        assert np.argmax(logits[0]) == np.argmax(wanted[end - 1])
