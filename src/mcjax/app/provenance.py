"""Where a run comes from: what it was asked for, what it is made of, and what tells it from every other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcjax.track.flat import flat
from mcjax.track.record import RunRecord
from mcjax.track.run_directory import now


@dataclass(frozen=True, slots=True)
class Origin:
    """Who asked for a run: the words that were typed, the options that they chose, and the sweep it belongs to."""

    argv: Sequence[str] = ()
    choices: Mapping[str, str] = field(default_factory=dict[str, str])
    sweep: str = ""


def record_of(plain: Mapping[str, Any], origin: Origin, inputs: Mapping[str, str]) -> RunRecord:
    """The record of a run that starts now. `plain` is its resolved config."""
    return RunRecord(
        started=now(),
        backend=plain["backend"]["name"],
        argv=tuple(origin.argv),
        sweep=origin.sweep,
        choices=dict(origin.choices),
        config=flat(plain),
        inputs=dict(inputs),
    )
