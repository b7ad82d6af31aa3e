"""One display over all points of a sweep: live lines on a terminal, a line for each point that ends elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from mcjax.app.sweep.messages import Event, Outcome, Stage
from mcjax.track.console import PLAIN_LINE_S, REFRESH_S, Figures, Outlook, duration, progress_line
from mcjax.track.sweep import CACHED, DONE, FAILED, INTERRUPTED


class SweepDisplay(Protocol):
    """What a sweep tells of its way; points go by their place."""

    def add(self, labels: Sequence[str]) -> None:
        """More points, and what tells each from the others."""
        ...

    def started(self, point: int) -> None: ...

    def told(self, point: int, event: Event) -> None: ...

    def said(self, point: int, line: str) -> None: ...

    def tick(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class NoSweepDisplay:
    """Shows nothing but what the points print, on standard error."""

    def add(self, labels: Sequence[str]) -> None:
        pass

    def started(self, point: int) -> None:
        pass

    def told(self, point: int, event: Event) -> None:
        pass

    def said(self, point: int, line: str) -> None:
        print(f"[point {point + 1}] {line}", file=sys.stderr)

    def tick(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


@dataclass(slots=True)
class _Running:
    """A point that is being played."""

    began_s: float
    outlook: Outlook = field(default_factory=lambda: Outlook(virtual=True))
    run_began_s: float = 0.0
    line: str = "starting"


class SweepProgress:
    """`output` gets everything, in lines that stay and, on a terminal, a few at its bottom that change."""

    def __init__(self, *, output: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        from rich.console import Console

        self._console = Console(file=output or sys.stdout)
        self._rich = self._console.is_terminal and not self._console.is_jupyter
        self._period_s = REFRESH_S if self._rich else PLAIN_LINE_S
        self._clock = clock
        self._began_s = self._drawn_s = clock()
        self._labels: list[str] = []
        self._running: dict[int, _Running] = {}
        self._ended: Counter[str] = Counter()
        self._live: Any = None

    def __enter__(self) -> Self:
        self._began_s = self._drawn_s = self._clock()
        if self._rich:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def add(self, labels: Sequence[str]) -> None:
        self._labels += labels

    def started(self, point: int) -> None:
        self._running[point] = _Running(self._clock())

    def told(self, point: int, event: Event) -> None:
        if isinstance(event, Outcome):
            self._end(point, event)
            return
        running = self._running[point]
        match event:
            case Outlook():
                running.outlook = event
                running.run_began_s = self._clock()
            case Stage():
                running.line = f"{event.what} {event.share_done:.0%}" if event.share_done else event.what
            case Figures():
                real_s = self._clock() - running.run_began_s
                running.line = progress_line(event, real_s, running.outlook.virtual, running.outlook.total_requests)

    def said(self, point: int, line: str) -> None:
        self._print(f"[point {point + 1}] {line}")

    def tick(self) -> None:
        if self._clock() - self._drawn_s < self._period_s:
            return
        self._drawn_s = self._clock()
        if self._live is None:
            self._print(f"mcjax: {self._overall()}")
        else:
            self._live.update(self._drawing(), refresh=True)

    def _end(self, point: int, outcome: Outcome) -> None:
        running = self._running.pop(point, None)
        self._ended[outcome.state] += 1
        if running is None:  # interrupted before it began: the total says so
            return
        took = "" if outcome.state == CACHED else f" after {duration(self._clock() - running.began_s)}"
        self._print(f"mcjax: {self._name(point)} {outcome.state}{took}: {self._labels[point]}")
        self._drawn_s = self._clock() if self._live is None else self._drawn_s

    def _overall(self) -> str:
        ended, total = sum(self._ended.values()), len(self._labels)
        parts = [f"{ended} of {total} points ended"]
        parts += [f"{self._ended[state]} {state}" for state in (CACHED, FAILED, INTERRUPTED) if self._ended[state]]
        parts += [f"{len(self._running)} running"]
        played, left = self._ended[DONE] + self._ended[FAILED], total - ended
        if played and left:
            parts.append(f"about {duration((self._clock() - self._began_s) * left / played)} left")
        return ", ".join(parts)

    def _drawing(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        total = max(1, len(self._labels))
        bar = ProgressBar(total=float(total), completed=sum(self._ended.values()), width=min(self._console.width, 60))
        lines = [
            Text(f"{self._name(point)}: {self._labels[point]}: {running.line}", no_wrap=True, overflow="ellipsis")
            for point, running in self._running.items()
        ]
        return Group(bar, Text(self._overall()), *lines)

    def _name(self, point: int) -> str:
        return f"point {point + 1} of {len(self._labels)}"

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
