"""Seeds as named streams: what is drawn for one purpose never changes what is drawn for another."""

from __future__ import annotations

import enum

import numpy as np
from omegaconf import DictConfig, OmegaConf

from mcjax.workload.superposed import part_seed


class Stream(enum.IntEnum):
    """The purposes. Their numbers are part of what makes a run repeatable: never renumber."""

    WORKLOAD = 0
    POLICY = 1
    SAMPLING = 2
    FAULTS = 3


def generator(seed: int, stream: Stream) -> np.random.Generator:
    return np.random.default_rng([seed, stream])


def seed_of(seed: int, stream: Stream) -> int:
    """One number drawn from a stream, for whoever seeds generators of its own."""
    return int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_workload(section: DictConfig, seed: int) -> None:
    """Give `seed` to a workload's config and to the one inside it; of several under names, each gets another seed."""
    if "seed" in section:
        section.seed = seed
    for inner in sections_of(section).values():
        if "_target_" in inner:
            seed_workload(inner, seed)
        else:
            for name, part in sections_of(inner).items():
                if "_target_" in part:
                    seed_workload(part, part_seed(seed, name))


def sections_of(section: DictConfig) -> dict[str, DictConfig]:
    """The values that are mappings of the section's own, by name."""
    names = [str(key) for key in section]
    own = [
        name for name in names if not (OmegaConf.is_missing(section, name) or OmegaConf.is_interpolation(section, name))
    ]
    return {name: section[name] for name in own if isinstance(section[name], DictConfig)}
