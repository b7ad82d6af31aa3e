"""`track.level`: how much of a run is kept."""

from __future__ import annotations

from mcjax.errors import ConfigError

SUMMARY, REQUESTS, FULL = "summary", "requests", "full"
LEVELS = (SUMMARY, REQUESTS, FULL)
"""The least first: each holds all that those before it hold."""
RENAMED = {"lean": REQUESTS}
"""What levels were called in earlier versions."""


def check_level(level: str) -> str:
    """The level. Raises `ConfigError` for an unknown one, naming today's name of an old one."""
    if level in RENAMED:
        raise ConfigError("track.level", level, f"is called {RENAMED[level]} now", LEVELS)
    if level not in LEVELS:
        raise ConfigError("track.level", level, "unknown level", LEVELS)
    return level


def as_named_now(level: str) -> str:
    """The level that an earlier version wrote down."""
    return RENAMED.get(level, level)


def holds(kept: str, wanted: str) -> bool:
    """Whether a run kept at one level holds all that `wanted` asks for."""
    return LEVELS.index(check_level(kept)) >= LEVELS.index(check_level(wanted))
