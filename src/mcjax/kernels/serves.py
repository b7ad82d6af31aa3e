"""Whether the kernels that a config names compute what a model's layers ask of attention. Free of jax."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any

from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from mcjax.kernels.choice import PARAMETERS, KernelChoice


def options_of(shape: ModelShape) -> dict[str, str]:
    """The keyword arguments of `base.Attention` that any layer of the model names, and what for."""
    wanted = {
        "window": ("layers with a window", any(window is not None for window in shape.windows)),
        "soft_cap": ("scores with a soft cap", shape.attention_soft_cap > 0),
        # A latent's width is not that of the heads, which the scale is of.
        "scale": ("a scale of its own", shape.query_scale > 0 or shape.latent is not None),
    }
    return {name: reason for name, (reason, needed) in wanted.items() if needed}


def check_serves(choice: KernelChoice, shape: ModelShape) -> None:
    """Raise `ConfigError` for the first kernel that cannot serve a model of `shape`, with what can.

    Pallas kernels read pages of keys and values: latents are XLA's. A user's own kernel has to take the options that
    the model's layers name; one whose signature cannot be told is trusted.
    """
    if shape.latent is not None:
        for key in choice.pallas:
            problem = f"reads keys and values, and model {shape.name} caches latents, which are both at once"
            raise ConfigError(f"kernels.{key}", "pallas", problem, ["xla"])
    options = options_of(shape)
    for key in ("prefill", "decode"):
        named = getattr(choice, key)
        if options and isinstance(named, Mapping):
            _check_own(f"kernels.{key}", str(named["_target_"]), options, shape)


def _check_own(key: str, target: str, options: Mapping[str, str], shape: ModelShape) -> None:
    found: Any = pkgutil.resolve_name(target)
    called, given = (found.__call__, (None,)) if isinstance(found, type) else (found, ())
    try:
        signature = inspect.signature(called)
    except ValueError:  # written in C
        return
    for option, reason in options.items():
        try:
            signature.bind_partial(*given, *PARAMETERS, **{option: None})
        except TypeError:
            problem = f"must take the keyword argument {option}: model {shape.name} has {reason}"
            raise ConfigError(key, target, problem, ["xla"]) from None
