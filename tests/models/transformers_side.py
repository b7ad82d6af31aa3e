"""The other side of parity: transformers on torch, with the numbers of `seeded_checkpoint`."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from numpy.typing import NDArray
from seeded_checkpoint import CASES, tensor
from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

torch.set_num_threads(1)  # of models this small, threads only wait for each other


def transformers_model(case: str, dtype: str = "float32") -> Any:
    config: Any = AutoConfig.for_model(**copy.deepcopy(CASES[case]))
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    unit_offset = CASES[case]["model_type"].startswith("gemma")
    state = {
        name: torch.tensor(tensor(name, tuple(value.shape), unit_offset)) for name, value in model.state_dict().items()
    }
    if CASES[case]["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model.to(getattr(torch, dtype))


def transformers_logits(model: Any, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """`[T, V]` of one row at every position.

    In one call; where its frequencies follow the length of the call (`dynamic`), token by token.
    """
    ids = torch.tensor(tokens[None].astype(np.int64))
    with torch.no_grad():
        if model.config.rope_parameters.get("rope_type") != "dynamic":
            return model(ids).logits[0].float().numpy()
        found, cache = [], None
        for step in range(ids.shape[1]):
            output = model(ids[:, step : step + 1], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            found.append(output.logits[0, 0].float().numpy())
        return np.stack(found)
