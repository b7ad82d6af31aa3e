"""What a kind of picture is: a name, a function that draws it, and what a reader should know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mcjax.track.plots.drawn import Drawn
from mcjax.track.plots.subject import Subject


@dataclass(frozen=True, slots=True)
class Kind:
    """`note` says what is shown and how it is read. `options` are keys that this kind takes beside those of all."""

    name: str
    title: str
    note: str
    draw: Callable[[Subject], Drawn]
    options: tuple[str, ...] = ()
