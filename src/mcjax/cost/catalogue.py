"""The shipped hardware, shapes and fitted constants by name, for code and notebooks that compose no Hydra config."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, cast

from mcjax.cost.fitted import Fitted
from mcjax.cost.hardware import Hardware
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError


def names(group: str) -> list[str]:
    """Options of a config group (`hardware`, `model`), sorted."""
    folder = files("mcjax").joinpath("conf", group)
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def _read(group: str, name: str) -> dict[str, Any]:
    import yaml  # here, so that importing mcjax stays light

    if name not in names(group):
        raise ConfigError(group, name, "is not in the catalogue", names(group))
    text = files("mcjax").joinpath("conf", group, f"{name}.yaml").read_text(encoding="utf-8")
    values = cast("dict[str, Any]", yaml.safe_load(text))
    values.pop("_target_")
    return values


def hardware(name: str) -> Hardware:
    """For example `hardware("a800x8")`. Raises `ConfigError` that lists the names."""
    return Hardware(**_read("hardware", name))


def model(name: str) -> ModelShape:
    """For example `model("llama3-70b")`. Raises `ConfigError` that lists the names."""
    values = _read("model", name)
    if "config" in values:
        return ModelShape.from_hugging_face(**values)
    return ModelShape.read(**values) if "path" in values else ModelShape(**values)


def fitted(name: str = "fitted") -> Fitted:
    """The constants of `conf/cost/NAME.yaml`."""
    return Fitted(**_read("cost", name))
