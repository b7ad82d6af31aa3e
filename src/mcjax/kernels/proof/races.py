"""The race detector of Pallas' TPU interpreter, whose findings are printed, logged or raised, by the release of jax."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

FOUND = "RACE DETECTED"


def races_of(call: Callable[[pltpu.InterpretParams], Any]) -> tuple[Any, list[str]]:
    """What `call` returned, and the races that were found in the kernels that it ran (none: an empty list).

    `call` is given what to pass as `interpret`. Copies are made as late as the kernel allows, when they are waited for,
    and memory that nobody wrote holds NaN: so a wait that is missing also shows in the numbers. The result is None
    where the release of jax raises the race. Not for two threads at once: what is printed meanwhile counts as found.
    """
    pltpu.reset_tpu_interpret_mode_state()
    printed, logged = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(logged)
    root = logging.getLogger()
    root.addHandler(handler)
    result, raised = None, ""
    try:
        with contextlib.redirect_stdout(printed):
            result = jax.block_until_ready(call(pltpu.InterpretParams(detect_races=True)))
    except Exception as error:
        if FOUND not in str(error):
            raise
        raised = str(error)
    finally:
        root.removeHandler(handler)
        pltpu.reset_tpu_interpret_mode_state()
    said = "\n".join((printed.getvalue(), logged.getvalue(), raised))
    return result, [" ".join(part.split()) for part in said.split(FOUND)[1:]]
