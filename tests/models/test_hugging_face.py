"""Names and layouts of Hugging Face checkpoints. That the numbers mean the same is for the comparisons of logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from seeded_checkpoint import SeededCheckpoint, shape_of

from family_cases import CONFIGS
from mcjax.cost.parameters import parameters
from mcjax.models.hugging_face import Dialect, dialect, stored, unused
from mcjax.models.pieces import pieces

EXPERTS = [case for case in CONFIGS if shape_of(case).experts]


@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("experts", ["separate", "mixtral", "fused"])
def test_tensors_hold_as_many_numbers_as_pieces_and_arrange_to_them(case: str, experts: str) -> None:
    shape = shape_of(case)
    places = stored(shape, Dialect(experts=experts))  # pyright: ignore[reportArgumentType]
    for name, parameter in parameters(shape).items():
        for piece in pieces(name, parameter):
            place = places[piece.name]
            assert place.read(lambda _, place=place: np.zeros(place.shape)).shape == piece.shape
    sizes = {tensor: int(np.prod(place.shape)) for place in places.values() for tensor in place.tensors}
    assert sum(sizes.values()) == sum(parameter.size for parameter in parameters(shape).values())


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_are_the_same_however_they_are_stored(case: str) -> None:
    shape = shape_of(case)
    fused = SeededCheckpoint(shape).places
    rng = np.random.default_rng(0)
    tensors = {tensor: rng.random(place.shape) for place in fused.values() for tensor in place.tensors}
    for name in [name for name in tensors if ".experts." in name]:
        block = name.split("mlp.")[0]
        for expert, whole in enumerate(tensors[name]):
            if name.endswith("down_proj"):
                parts = {"down_proj": whole, "w2": whole}
            else:
                gate, up = np.split(whole, 2)
                parts = {"gate_proj": gate, "up_proj": up, "w1": gate, "w3": up}
            for part, numbers in parts.items():
                parent = "block_sparse_moe" if part.startswith("w") else "mlp"
                tensors[f"{block}{parent}.experts.{expert}.{part}.weight"] = numbers
        tensors[f"{block}block_sparse_moe.gate.weight"] = tensors[f"{block}mlp.gate.weight"]
    for experts in ("separate", "mixtral"):
        for name, place in stored(shape, Dialect(experts=experts)).items():
            np.testing.assert_array_equal(place.read(tensors.__getitem__), fused[name].read(tensors.__getitem__))


def test_neighbours_that_turn_together_are_brought_half_a_head_apart() -> None:
    shape = shape_of("deepseek_v3")
    latent = shape.latent
    assert latent is not None
    place = stored(shape, Dialect())["blocks.0.attention.latent_down"]
    rows = np.arange(latent.cache_dim)
    arranged = place.arrange(np.repeat(rows[:, None], shape.d_model, axis=1))[0]
    turned = latent.kv_rank + np.array([0, 2, 4, 6, 1, 3, 5, 7])
    np.testing.assert_array_equal(arranged, [*range(latent.kv_rank), *turned])


def test_a_dialect_is_told_by_names() -> None:
    assert dialect(["model.embed_tokens.weight", "model.layers.61.embed_tokens.weight"]) == Dialect()
    assert dialect(["embed_tokens.weight", "layers.0.mlp.experts.gate_up_proj"]) == Dialect("", "fused")
    names = ["model.layers.0.block_sparse_moe.gate.weight", "model.embed_tokens.weight"]
    assert dialect(names) == Dialect("model.", "mixtral")
    inside = dialect(["language_model.model.embed_tokens.weight"])
    assert (inside.prefix, inside.head) == ("language_model.model.", "language_model.lm_head.weight")


def test_what_a_decoder_does_without_is_told_from_what_it_does_not_know() -> None:
    shape = shape_of("deepseek_v3")  # of three layers
    further = ["model.layers.3.eh_proj.weight", "model.layers.3.input_layernorm.weight"]
    strange = ["model.layers.4.input_layernorm.weight", "model.layers.0.bias", "vision_tower.patches", "lm_head.weight"]
    old = ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert unused(shape, Dialect(), [*further, *strange, *old]) == {*further, *old}
    assert unused(shape, Dialect(), further[1:]) == set()
    tied = shape_of("gemma3")
    assert unused(tied, Dialect(), strange) == {"lm_head.weight"}
    assert unused(tied, Dialect("language_model.model."), strange) == {"vision_tower.patches"}


@pytest.mark.parity
@pytest.mark.parametrize("case", CONFIGS)
def test_files_that_transformers_writes_hold_these_names(case: str, tmp_path: Path) -> None:
    """It writes experts one by one, as they are published."""
    from safetensors.numpy import load_file
    from transformers_side import transformers_model

    transformers_model(case).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shape = shape_of(case)
    found = dialect(tensors)
    places = stored(shape, found)
    assert found.experts == {"mixtral": "mixtral"}.get(case, "separate")
    wanted = {tensor: place.shape for place in places.values() for tensor in place.tensors}
    assert {name: numbers.shape for name, numbers in tensors.items()} == wanted
    seeded = SeededCheckpoint(shape)
    for name, parameter in parameters(shape).items():
        for piece in pieces(name, parameter):
            ours = seeded.piece(piece.name)
            np.testing.assert_array_equal(places[piece.name].read(tensors.__getitem__), ours, piece.name)
