"""One process of a sweep: plays one point after the other, tells of its way, and does not outlive its parent.

Started as `python -m mcjax.app.sweep.worker DESCRIPTOR PARENT`: its end of a socket, and a process. What user code
prints goes to standard output and error as ever, and cannot get between the messages.
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from mcjax.app.command import explain
from mcjax.app.compose import compose_with_choices
from mcjax.app.provenance import Origin
from mcjax.app.run import execute
from mcjax.app.sweep.given import unpacked
from mcjax.app.sweep.messages import Job, Outcome, Stage, receive, send
from mcjax.track.console import Figures, Outlook
from mcjax.track.run import Run
from mcjax.track.sweep import CACHED, DONE, FAILED, INTERRUPTED

TELL_PERIOD_S = 0.5
LOOK_PERIOD_S = 1.0
"""How often a worker looks whether its parent is still there, should the socket not tell."""
END_S = 10.0
"""How long an idle worker may take to end in an orderly way."""


class Teller:
    """The run's display: hands what it hears to the parent, now and then."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._told_s = 0.0

    def open(self, outlook: Outlook) -> Teller:
        send(self._connection, outlook)
        return self

    def stage(self, what: str, share_done: float = 0.0) -> None:
        self._tell(Stage(what, share_done))

    def update(self, figures: Figures) -> None:
        self._tell(figures)

    def _tell(self, event: Stage | Figures) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= TELL_PERIOD_S:
            self._told_s = now_s
            send(self._connection, replace(event))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class Worker:
    """Reads jobs on a thread, so that a parent's end is seen in the middle of a point too."""

    def __init__(self, connection: Connection, parent: int):
        self._connection = connection
        self._parent = parent
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._playing = False

    def serve(self) -> None:
        threading.Thread(target=self._listen, name="mcjax.sweep.parent", daemon=True).start()
        while (job := self._jobs.get()) is not None:
            self._playing = True
            outcome = self._play(job)
            self._playing = False
            send(self._connection, outcome)
            del outcome
            gc.collect()  # a run's tens of megabytes lie in cycles until then

    def _play(self, job: Job) -> Outcome:
        """Ctrl-C, passed on by the parent, reaches the run and nothing else; one that came too early comes now."""
        debug = False
        try:
            _heed_interrupts(True)
            config, choices = compose_with_choices(job.overrides)
            debug = bool(config.debug)
            plugins = unpacked(job.strategies)
            origin = Origin(["mcjax", *job.overrides], choices, job.sweep)
            run = execute(config, plugins, origin, Teller(self._connection).open)
            _heed_interrupts(False)
            return _outcome_of(run)
        except KeyboardInterrupt:
            _heed_interrupts(False)
            return Outcome(INTERRUPTED, "interrupted")
        except BaseException as problem:  # a strategy may even call sys.exit
            _heed_interrupts(False)
            text = "".join(traceback.format_exception(problem)) if debug else explain(problem)
            return Outcome(FAILED, text.strip())

    def _listen(self) -> None:
        """Put jobs into the queue. With the parent gone, so is the point: its directory keeps the marker RUNNING."""
        try:
            while os.getppid() == self._parent:
                if self._connection.poll(LOOK_PERIOD_S):
                    self._jobs.put(receive(self._connection))
        except (EOFError, OSError):
            pass
        if not self._playing:
            self._jobs.put(None)
            deadline_s = time.monotonic() + END_S
            while not self._playing and time.monotonic() < deadline_s:
                time.sleep(0.1)
        os._exit(1)


def _outcome_of(run: Run) -> Outcome:
    if run.state == "done":
        return Outcome(CACHED if run.cached else DONE, run=run)
    return Outcome(INTERRUPTED if run.reason == "interrupted" else FAILED, run.reason, run)


def _heed_interrupts(heeded: bool) -> None:
    """An interrupt that comes while it is not heeded waits."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK if heeded else signal.SIG_BLOCK, [signal.SIGINT])


def main(descriptor: int, parent: int) -> None:
    _heed_interrupts(False)  # as the parent has arranged already
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored where the sweep was started
    os.set_inheritable(descriptor, False)
    sys.argv = ["mcjax"]
    Worker(Connection(descriptor), parent).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
