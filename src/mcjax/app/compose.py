"""From overrides to a config, and from a section of it to the object that it names."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

from mcjax.app.mistakes import check_arguments, locate
from mcjax.app.options import suggest, told
from mcjax.errors import ConfigError, McjaxError


def compose(overrides: Sequence[str]) -> DictConfig:
    """The config that `mcjax *overrides` would run. Hydra's own errors, with its suggestions, pass through."""
    return compose_with_choices(overrides)[0]


def compose_with_choices(overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """The config, and which option of each group it is made of: `{"sched/prefill": "random"}`."""
    with contextlib.ExitStack() as stack:
        if not GlobalHydra.instance().is_initialized():  # it is, inside another Hydra application
            stack.enter_context(initialize_config_module("mcjax.conf", version_base=None))
        try:
            config = hydra_compose("config", told(overrides), return_hydra_config=True)
        except Exception as problem:
            suggest(problem)
            raise
    choices = choices_of(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return config, choices


def choices_of(chosen: Mapping[str, Any]) -> dict[str, str]:
    """Hydra's own record of the options, its own groups left out."""
    return {str(group): str(option) for group, option in chosen.items() if not str(group).startswith("hydra/")}


def plain_of(config: DictConfig) -> dict[str, Any]:
    """A composed config as plain values."""
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))


def made(config: DictConfig, key: str, section: Any = None) -> Any:
    """What the section at `key` names by its `_target_`. Raises `ConfigError` for a mistake in it.

    What the user's own code raises passes through as it is.
    """
    section = OmegaConf.select(config, key) if section is None else section
    if OmegaConf.is_missing(section, "_target_"):
        raise ConfigError(f"{key}._target_", "", "must be given, such as my_policy.Mine")
    target = locate(f"{key}._target_", section["_target_"])
    values = cast("dict[str, Any]", OmegaConf.to_container(section, resolve=True, throw_on_missing=True))
    arguments = {name: value for name, value in values.items() if not name.startswith("_")}
    check_arguments(key, target, arguments, partial=values.get("_partial_", False))
    try:
        return instantiate(section)
    except InstantiationException as problem:
        cause = problem.__cause__ or problem
        if isinstance(cause, ConfigError):
            _tell_where(cause, key, str(problem))
        if isinstance(cause, McjaxError) or not section["_target_"].startswith("mcjax."):
            raise cause from None
        raise ConfigError(key, arguments, f"cannot be made: {cause}") from problem


def _tell_where(problem: ConfigError, key: str, told: str) -> None:
    """Let the error of an object inside another one name the key that it has there: a class knows only its usual one.

    `told` is what Hydra says of it.
    """
    where = told.rpartition("full_key: ")[2].strip()
    listed = key.partition("[")[0]
    if where.startswith(f"{key}.") and problem.key.startswith(f"{key}.") and not problem.key.startswith(where):
        there = where + problem.key.removeprefix(key)
    elif listed != key and problem.key.startswith(f"{listed}.") and not problem.key.startswith(key):
        there = f"{key}.{problem.key.rpartition('.')[2]}"  # one of a list, such as track.sinks[1]
    else:
        return
    problem.args = (str(problem).replace(problem.key, there, 1),)
    problem.key = there


def plain_value(value: Any) -> Any:
    """A value of a config as plain Python."""
    return OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
