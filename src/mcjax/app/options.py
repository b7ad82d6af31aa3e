"""What is checked of a config before anything is made from it, and how overrides are read to Hydra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from mcjax.app.mistakes import close_to
from mcjax.app.sweep.expand import refuse_unexpanded
from mcjax.errors import ConfigError

WHOLE_NUMBERS: Mapping[str, int] = {
    "seed": 0,
    "slices": 1,
    "slice": 0,
    "sched.attempts": 1,
    "transfer.attempts": 1,
    "engine.max_steps": 1,
    "engine.headroom_tokens": 1,
    "kvpool.block_tokens": 1,
    "kvpool.dram_bytes": 1,
    "backend.chunk_tokens": 1,
    "backend.max_batch": 1,
    "backend.max_context_tokens": 1,
    "backend.pages": 1,
    "backend.memory_bytes": 1,
    "backend.fused_steps": 1,
    "backend.pool_blocks": 1,
    "backend.schedules": 1,
}
"""Keys that no one class of ours declares, and the least each may be."""

SECONDS: Mapping[str, bool] = {
    "sched.report_period_s": True,
    "sched.view_delay_s": False,
    "transfer.deadline_s": True,
    "engine.lease_s": True,
    "engine.wait_s": False,
    "engine.detect_s": False,
    "engine.timeout_s": True,
    "engine.stall_s": True,
}
"""Durations, and whether they must be more than 0."""

SWITCHES = ("verify", "rerun", "debug", "backend.verify", "backend.poison")
NULLABLE = (
    "verify",
    "engine.max_steps",
    "engine.headroom_tokens",
    "engine.timeout_s",
    "kvpool.block_tokens",
    "kvpool.dram_bytes",
    "backend.pages",
    "backend.memory_bytes",
)


def check_numbers(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first value of a wrong type or range. `config` is plain."""
    for key, least in WHOLE_NUMBERS.items():
        value = _found(config, key)
        if isinstance(value, float) and value.is_integer():  # 1e12 is how people write bytes
            continue
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ConfigError(key, value, f"must be a whole number, {least} or more" + _or_null(key))
    for key, positive in SECONDS.items():
        value = _found(config, key)
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
        if value is not None and (wrong or not value >= 0 or (positive and value == 0)):
            raise ConfigError(key, value, f"must be {'more than 0' if positive else '0 or more'} seconds")
    for key in SWITCHES:
        value = _found(config, key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(key, value, "must be true or false" + _or_null(key))
    for key in (*WHOLE_NUMBERS, *SECONDS, *SWITCHES):
        section, _, name = key.rpartition(".")
        there = name in (_found(config, section) if section else config)
        if there and _found(config, key) is None and key not in NULLABLE:
            raise ConfigError(key, "null", "needs a value")
    share = _found(config, "backend.memory_share")
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
        raise ConfigError("backend.memory_share", share, "must be more than 0 and at most 1")


def check_together(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for choices that exclude each other: nothing that is asked for is silently left out."""
    if config["slice"] >= config["slices"]:
        raise ConfigError("slice", config["slice"], f"must be below slices={config['slices']}")
    world = config["backend"]["name"]
    if config["verify"] and world != "jax":
        raise ConfigError("verify", True, "only the real engine is compared with a colocated one", ["backend=jax"])
    faults = {name: value for name, value in config["faults"].items() if not name.startswith("_") and value}
    if faults and world != "check":
        name, value = next(iter(faults.items()))
        problem = f"backend={world} injects no faults; take backend=check, or faults=none"
        raise ConfigError(f"faults.{name}", value, problem)
    if config["kvpool"]["dram_bytes"] is not None and world == "jax":
        problem = "sizes simulated pools; the real engine's are sized by backend.pool_blocks"
        raise ConfigError("kvpool.dram_bytes", config["kvpool"]["dram_bytes"], problem, ["null"])


def told(overrides: Sequence[str]) -> list[str]:
    """The overrides as Hydra takes them: keys of a `custom` strategy need no `+`, `-m` may stand anywhere.

    Raises `ConfigError` for words that stand for several runs: where there may be several, they were expanded before.
    """
    refuse_unexpanded(overrides)
    own = [word.removesuffix("=custom").replace("/", ".") + "." for word in overrides if word.endswith("=custom")]
    words = [f"++{word}" if word.startswith(tuple(own)) and "=" in word else word for word in overrides]
    return sorted(words, key=lambda word: word not in ("-m", "--multirun"))


def suggest(problem: BaseException) -> None:
    """Note on an error of Hydra's which key was probably meant."""
    cause: Any = problem.__cause__
    siblings = getattr(cause, "parent_node", None)
    if siblings is not None and getattr(cause, "key", None) is not None:
        hint = close_to(str(cause.key), [str(name) for name in siblings])
        if hint:
            problem.add_note(f"{cause.full_key or cause.key}{hint}?")


def _found(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = cast("Mapping[str, Any]", value).get(part)
    return value


def _or_null(key: str) -> str:
    return ", or null" if key in NULLABLE else ""
