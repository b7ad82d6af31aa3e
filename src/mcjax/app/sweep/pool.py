"""Plays points in worker processes, several at a time, and hears what they tell."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Protocol

from mcjax.app.sweep.messages import Event, Job, Outcome
from mcjax.app.sweep.process import WorkerProcess
from mcjax.track.sweep import FAILED, INTERRUPTED

PERIOD_S = 0.2


class Observer(Protocol):
    """Who watches. Points go by their place in the sweep."""

    def started(self, point: int) -> None: ...

    def told(self, point: int, event: Event) -> None:
        """The outcome, which comes last, too."""
        ...

    def said(self, point: int, line: str) -> None:
        """A line that a strategy, or a library, has printed."""
        ...

    def tick(self) -> None:
        """A few times a second."""
        ...


class Interrupts:
    """How often Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, number: int, frame: object) -> None:
        self.count += 1


@contextmanager
def interrupts() -> Generator[Interrupts, None, None]:
    """Counts Ctrl-C instead of raising it in the middle of something. Where it is ignored (`nohup`), it stays so."""
    pressed = Interrupts()
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield pressed
        return
    before = signal.signal(signal.SIGINT, pressed)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


class Pool:
    """`slots` points at a time. A process is used again, unless its points are to have one each (`alone`).

    A process that dies fails the point that it was playing, and no other. The first Ctrl-C interrupts what is running
    (and keeps its tables) and starts nothing more; the second kills.
    """

    def __init__(
        self, slots: int, observer: Observer, environment: Mapping[str, str], alone: Callable[[int], bool]
    ) -> None:
        self._slots = slots
        self._observer = observer
        self._environment = environment
        self._alone = alone
        self._idle: list[WorkerProcess] = []
        self._busy: dict[WorkerProcess, int] = {}
        self._waiting: deque[tuple[int, Job]] = deque()
        self._interrupted = False

    def play(self, jobs: Sequence[tuple[int, Job]]) -> bool:
        """Play them all. Returns whether that was not interrupted."""
        self._waiting.extend(jobs)
        passed_on = 0
        with interrupts() as pressed:
            try:
                while self._waiting or self._busy:
                    if pressed.count > passed_on:
                        self._interrupt(kill=passed_on > 0)
                        passed_on += 1
                    self._fill()
                    self._hear()
                    self._observer.tick()
            finally:
                self._close()
        return not self._interrupted

    def _fill(self) -> None:
        while self._waiting and len(self._busy) < self._slots:
            point, job = self._waiting.popleft()
            worker = self._idle.pop() if self._idle else WorkerProcess(self._environment)
            self._busy[worker] = point
            self._observer.started(point)
            worker.give(job)

    def _hear(self) -> None:
        sources = [worker.connection for worker in self._busy]
        outputs = [worker.output for worker in self._busy if not worker.output_ended]
        wait([*sources, *outputs], PERIOD_S)
        for worker, point in list(self._busy.items()):
            gone = worker.ended  # asked first: what it told before its end is then all there
            events = worker.events()
            over = any(isinstance(event, Outcome) for event in events)
            for line in worker.lines(all_of_it=over or gone):
                self._observer.said(point, line)
            for event in events:
                self._observer.told(point, event)
            if over:
                self._release(worker)
            elif gone:
                self._lost(worker, point)

    def _release(self, worker: WorkerProcess) -> None:
        point = self._busy.pop(worker)
        if self._alone(point) or worker.ended:
            worker.close()
        else:
            self._idle.append(worker)

    def _lost(self, worker: WorkerProcess, point: int) -> None:
        del self._busy[worker]
        why = worker.death()
        self._observer.told(point, Outcome(INTERRUPTED, "killed") if self._interrupted else Outcome(FAILED, why))
        worker.close()

    def _interrupt(self, kill: bool) -> None:
        self._interrupted = True
        for point, _ in self._waiting:
            self._observer.told(point, Outcome(INTERRUPTED, "interrupted before it began"))
        self._waiting.clear()
        for worker in self._busy:
            worker.kill() if kill else worker.interrupt()

    def _close(self) -> None:
        """Whatever happened, nothing goes on."""
        for worker in self._busy:
            worker.kill()
        for worker in [*self._busy, *self._idle]:
            worker.close()
        self._busy.clear()
        self._idle.clear()
