"""mcjax: KVCache-centric, disaggregated LLM inference, to be run, simulated and checked with one policy code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcjax.app.replay import replay as replay
    from mcjax.app.rerun import rerun as rerun
    from mcjax.app.run import run as run
    from mcjax.app.sweep.api import sweep as sweep
    from mcjax.track.run import Run as Run
    from mcjax.track.runs import Runs as Runs
    from mcjax.track.runs import load as load

__version__ = "0.1.0"
__all__ = ["Run", "Runs", "__version__", "load", "replay", "rerun", "run", "sweep"]

_HOMES = {
    "run": "mcjax.app.run",
    "sweep": "mcjax.app.sweep.api",
    "replay": "mcjax.app.replay",
    "rerun": "mcjax.app.rerun",
    "load": "mcjax.track.runs",
    "Run": "mcjax.track.run",
    "Runs": "mcjax.track.runs",
}


def __getattr__(name: str) -> Any:
    # Imported at first use, so that `import mcjax` is quick and brings neither jax nor hydra.
    if name not in _HOMES:
        raise AttributeError(f"module 'mcjax' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
