"""The model's tokenizer, given to the workloads that want one."""

from __future__ import annotations

import inspect

from omegaconf import DictConfig, OmegaConf

from mcjax.app.mistakes import locate
from mcjax.app.streams import sections_of

TARGET = "mcjax.models.tokenizer.from_checkpoint"


def give_tokenizer(section: DictConfig, checkpoint: str, vocab: int) -> None:
    """Put the tokenizer of a checkpoint, as a config, into a workload's config and into those inside it.

    Only where the target takes a `tokenizer`, and the config names none.
    """
    if "_target_" in section and not OmegaConf.is_missing(section, "_target_"):
        target = locate("workload._target_", section["_target_"])
        if section.get("tokenizer") is None and _takes_tokenizer(target):
            section["tokenizer"] = {"_target_": TARGET, "checkpoint": checkpoint, "vocab": vocab}
    for name, inner in sections_of(section).items():
        if name != "tokenizer":
            give_tokenizer(inner, checkpoint, vocab)


def _takes_tokenizer(target: object) -> bool:
    try:
        return callable(target) and "tokenizer" in inspect.signature(target).parameters
    except (TypeError, ValueError):  # written in C
        return False
