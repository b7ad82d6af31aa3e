"""Which kernels an engine runs: names, or the user's own. Free of jax, so that a config can be held against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from mcjax.errors import ConfigError

Layout = Literal["tokens_first", "heads_first"]
"""How pages lie on a device: `[P, L, C, page, Hkv, D]`, or `[P, L, C, Hkv, page, D]`. What leaves it is always the
first."""

Named: TypeAlias = "str | Mapping[str, Any]"
"""An implementation by name; or the user's own as `{_target_: module.name, argument: value, ..}`."""

NAMES: Mapping[str, tuple[str, ...]] = {
    "prefill": ("xla", "pallas", "reference"),
    "decode": ("xla", "pallas", "reference"),
    "kv_pack": ("xla", "pallas"),
    "pages": ("tokens_first", "heads_first"),
}
"""By key of the config's section `kernels`."""

PARAMETERS: tuple[str, ...] = ("queries", "keys", "values", "pages", "layer", "page_table", "positions")
"""What an attention takes, in this order: see `base.Attention`."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """One implementation for each thing that kernels do. Raises `ConfigError` for what cannot be, with what can."""

    prefill: Named = "xla"
    decode: Named = "xla"
    kv_pack: Named = "xla"
    pages: Layout = "tokens_first"

    def __post_init__(self) -> None:
        for key, names in NAMES.items():
            value = getattr(self, key)
            if isinstance(value, Mapping) and key != "pages":
                if not isinstance(value.get("_target_"), str):
                    raise ConfigError(f"kernels.{key}", dict(value), "needs a _target_, such as my_kernels.attention")
            elif value not in names:
                raise ConfigError(f"kernels.{key}", value, "there is no such implementation", names)
            elif value == "pallas" and self.pages != "heads_first":
                problem = f"reads pages heads first, and kernels.pages={self.pages}"
                raise ConfigError(f"kernels.{key}", value, problem, ["xla", "kernels.pages=heads_first"])

    @property
    def exact(self) -> bool:
        """Whether a sequence's bits depend on nothing but its tokens, however its prompt is cut: XLA's promise, which
        others do not make. What they compute is compared with XLA's, within a margin."""
        return all(chosen in ("xla", "reference") for chosen in (self.prefill, self.decode))

    @property
    def pallas(self) -> tuple[str, ...]:
        """The keys of what is done by Pallas kernels of this package."""
        return tuple(key for key in NAMES if getattr(self, key) == "pallas")
