"""When two engines must agree to the bit, and by how much they may differ otherwise. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mcjax.backends.jax.meshes import MeshAxes, read_meshes
from mcjax.types import Role, Sampling, Tokens

NUMERICS = ("invariant", "fast")

TOLERANCES = {2: 1.0, 4: 5e-4}
"""By bytes a weight: how far two engines' logits for one token may lie apart, as they round in another order. A few
times what was measured (docs/backends-jax.md)."""


def common_mesh(numerics: str, mesh: object, roles: Sequence[Role]) -> MeshAxes | None:
    """The one mesh of all instances, if their tokens and bytes are then those of any engine on such a mesh; else
    None: what they compute differs from one to another by rounding."""
    meshes = {*read_meshes(mesh).each(roles)}
    return min(meshes) if numerics == "invariant" and len(meshes) == 1 else None


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What an engine made of a prompt. At least one token of output."""

    prompt: Tokens
    output: Tokens
    sampling: Sampling


def comparable(sampling: Sampling) -> bool:
    """Whether a small error of the logits bounds how far a token can fall short: filters cut where logits are close,
    and penalties scale them."""
    return dataclasses.replace(sampling, logprobs=None).plain
