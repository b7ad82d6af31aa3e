"""`mcjax chat [key=value ...]`: talk to a model in the terminal, on the real engine.

Takes what a run takes: model=smollm2, cluster=1m, backend.max_context_tokens=4096. Of workload=text it heeds system,
max_tokens, ignore_eos and sampling: workload.sampling.temperature=0.7. /reset forgets the conversation, /quit or Ctrl-D
leaves, Ctrl-C stops an answer. After each answer stand the time to first token, the rate, and what came from the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import signal
import sys
import threading
import unicodedata
from collections.abc import Callable, Generator, Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from hydra.errors import HydraException
from numpy.typing import NDArray
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from mcjax import aio
from mcjax.app.build import build, track_settings
from mcjax.app.command import DONE, FAILED, INTERRUPTED, MISTAKE, explain
from mcjax.app.compose import compose, made, plain_of
from mcjax.app.plugins import Plugins
from mcjax.app.runner import Rehearsal, service_of
from mcjax.app.schema.check import check
from mcjax.engine.frontend import Ticket
from mcjax.engine.service import Service
from mcjax.errors import ChatTemplateError, ConfigError, McjaxError, UserError
from mcjax.kvpool.keys import KeyTable
from mcjax.models.tokenizer import tokenizer_for
from mcjax.sched.output import LENGTH
from mcjax.track import console
from mcjax.track.recorder import TableRecorder
from mcjax.types import NS_PER_S, ChatMessage, Request, RequestRow, RequestState, Sampling, Tokenizer, Tokens
from mcjax.workload.base import Session
from mcjax.workload.text import sampling_of

DEFAULTS = (
    "workload=text",
    # ++: not every backend has these; that is refused in our own words
    "++backend.pages=128",
    "++backend.pool_blocks=512",
    "++backend.numerics=fast",
    "++backend.max_batch=1",
    "++backend.prefill_widths=[64]",
)
"""One who talks needs less room than a workload, and waits for every token. What the user says comes after."""
HELP = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


def command(arguments: Sequence[str]) -> int:
    """Talk until the input ends. Exit status as of a run."""
    parser = argparse.ArgumentParser(
        "mcjax chat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for a run")
    overrides = parser.parse_args(arguments).overrides
    debug = "debug=true" in overrides
    try:
        talk(compose([*DEFAULTS, *overrides]))
    except (McjaxError, HydraException, OmegaConfBaseException) as problem:
        if debug:
            raise
        print(f"mcjax: {explain(problem)}", file=sys.stderr)
        return MISTAKE if isinstance(problem, UserError | HydraException | OmegaConfBaseException) else FAILED
    except KeyboardInterrupt:
        print("mcjax: interrupted", file=sys.stderr)
        return INTERRUPTED
    return DONE


def talk(config: DictConfig) -> None:
    """Make what the config names, and talk over the terminal until the input ends."""
    plain = plain_of(config)
    if config.backend.name != "jax":
        raise ConfigError("backend", config.backend.name, "has no answers to give: only a real engine has", ["jax"])
    if plain["workload"].get("_target_") != "mcjax.workload.text.Text":
        raise ConfigError("workload", plain["workload"].get("_target_"), "a chat has its own", ["text"])
    check(plain)
    tokenizer = tokenizer_for(made(config, "model"))
    manner = Manner.of(plain, tokenizer)
    table = KeyTable()
    recorder = TableRecorder(table.key, "requests")
    rehearsal = build(config, Plugins({}), _Nobody(), table, recorder, track_settings(config))
    Chat(rehearsal, tokenizer, manner, f"{plain['model']['name']} on {config.cluster}").run()


@dataclasses.dataclass(frozen=True, slots=True)
class Manner:
    """How answers are asked for."""

    system: str | None
    max_tokens: int
    max_context_tokens: int
    sampling: Sampling

    @classmethod
    def of(cls, config: dict[str, Any], tokenizer: Tokenizer) -> Manner:
        section = config["workload"]
        sampling = sampling_of(section["sampling"])
        if sampling.n != 1:
            raise ConfigError("workload.sampling.n", sampling.n, "a chat has one answer", [1])
        ends = () if section["ignore_eos"] else tokenizer.end_tokens
        return cls(
            section["system"],
            section["max_tokens"],
            config["backend"]["max_context_tokens"],
            dataclasses.replace(sampling, stop_tokens=ends),
        )


class _Nobody:
    """A workload that sends nothing: all requests are typed."""

    name = "chat"
    block_tokens: int | None = None

    def sessions(self) -> Iterator[Session]:
        return iter(())

    def inputs(self) -> dict[str, str]:
        return {}


class Keyboard:
    """Lines of standard input, read on a thread only when asked for one."""

    def __init__(self) -> None:
        self._terminal = sys.stdin.isatty()
        self._asked = threading.Semaphore(0)
        self._answer: Callable[[str | None], None] = lambda line: None
        threading.Thread(target=self._read, name="mcjax.keyboard", daemon=True).start()

    async def line(self) -> str | None:
        """The next line; None at the end of the input."""
        clock, future = aio.clock(), aio.new_future()

        def came(line: str | None) -> None:
            if not future.done():
                future.set_result(line)

        def answer(line: str | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                clock.post(came, line)

        self._answer = answer
        self._asked.release()
        return await future

    def _read(self) -> None:
        if self._terminal:
            with contextlib.suppress(ImportError):
                import_module("readline")  # `input` then edits lines, and remembers them
        while True:
            self._asked.acquire()
            try:
                line = input("> ") if self._terminal else sys.stdin.buffer.readline().decode(errors="replace")
            except (EOFError, OSError):
                line = ""
            else:
                line = f"{line}\n" if self._terminal else line
            self._answer(line or None)
            if not line:
                return


class Chat:
    """One conversation over the terminal."""

    def __init__(self, rehearsal: Rehearsal, tokenizer: Tokenizer, manner: Manner, title: str):
        self._r = rehearsal
        self._tokenizer = tokenizer
        self._manner = manner
        self._title = title
        self._messages: list[ChatMessage] = []
        self._requests = 0
        self._ticket: Ticket | None = None

    def run(self) -> None:
        """Prepare the world, then talk until the input ends."""
        self._r.world.run(self._main)

    async def _main(self) -> None:
        r = self._r
        try:
            progress = console.Progress(virtual=False) if sys.stdout.isatty() else console.NullProgress()
            with progress:
                await r.world.prepare([(spec.name, spec.role) for spec in r.instances], progress.stage)
            async with aio.Scope("chat") as scope:
                service = service_of(r, scope)
                service.start(r.instances)
                aio.start_of_run()
                with self._interrupts_stop_answers():
                    await scope.run(self._talk(service))
        finally:
            await r.world.close()

    @contextlib.contextmanager
    def _interrupts_stop_answers(self) -> Generator[None, None, None]:
        clock, before = aio.clock(), signal.getsignal(signal.SIGINT)

        def interrupted(*_: object) -> None:
            clock.post(self._interrupted)

        # By way of the loop, which a plain handler would not wake.
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted)
        try:
            yield
        finally:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, before)

    def _interrupted(self) -> None:
        if self._ticket is not None:
            self._ticket.cancel()
        else:
            _say(f"\n({HELP})\n")

    async def _talk(self, service: Service) -> None:
        keyboard = Keyboard()
        self._forget()
        _say(f"{self._title}. {HELP}.\n")
        while (line := await keyboard.line()) is not None:
            said = line.strip()
            if said == "/quit":
                return
            if said == "/reset":
                self._forget()
                _say("(forgotten)\n")
            elif said.startswith("/"):
                _say(f"(there is no {said.split()[0]}; {HELP})\n")
            elif said:
                await self._answer(service, said)
        _say("\n")

    def _forget(self) -> None:
        system = self._manner.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    async def _answer(self, service: Service, said: str) -> None:
        """Send what was said, show the answer as it comes, and keep both; neither, if there is no answer."""
        messages: list[ChatMessage] = [*self._messages, {"role": "user", "content": said}]
        try:
            prompt = np.array(self._tokenizer.apply_chat_template(messages), np.int32)
        except ChatTemplateError as problem:
            _say(f"({problem})\n")
            return
        room = self._manner.max_context_tokens - len(prompt)
        if room < 1:
            limit = f"{len(prompt)} tokens, and backend.max_context_tokens={self._manner.max_context_tokens}"
            _say(f"(the conversation has grown too long: {limit}; /reset forgets it)\n")
            return
        sampling = self._manner.sampling
        request = Request(
            request_id=self._requests,
            arrival_ns=aio.now_ns(),
            prompt_tokens=len(prompt),
            max_tokens=min(self._manner.max_tokens, room),
            tokens=prompt,
            session="chat",
            turn=self._requests,
            sampling=dataclasses.replace(sampling, seed=sampling.seed + self._requests),
        )
        self._requests += 1
        came_ns: list[int] = []

        def listen(tokens: Tokens | None, ends_ns: NDArray[np.int64]) -> None:
            came_ns.extend(ends_ns.tolist())

        self._ticket = service.frontend.submit(request, listen, lambda output, text: _say(shown(text)))
        try:
            row = await self._ticket.task
        finally:
            self._ticket = None
        _say("\n")
        stopped = row.state is RequestState.CANCELLED
        if row.state is not RequestState.COMPLETED and not (stopped and row.output):
            _say(f"({row.reason or row.state})\n")
            return
        self._messages = [*messages, {"role": "assistant", "content": row.output or []}]
        ended = "stopped, " if stopped else f"cut off after {len(came_ns)}, " if row.finish_reason == LENGTH else ""
        _say(f"({ended}{figures(row, came_ns)})\n")


def figures(row: RequestRow, came_ns: Sequence[int]) -> str:
    """Time to first token, rate of the tokens after it (`came_ns`), and how much of the prompt came from the cache."""
    parts = [f"first token after {console.duration((row.first_token_ns - row.request.arrival_ns) / NS_PER_S)}"]
    if came_ns[-1] > came_ns[0]:
        rate = (len(came_ns) - 1) * NS_PER_S / (came_ns[-1] - came_ns[0])
        parts.append(f"{rate:,.0f} tokens/s" if rate >= 100 else f"{rate:.3g} tokens/s")
    cached = row.hit_tokens
    parts.append(f"{cached} of {row.request.prompt_tokens} prompt tokens from the cache")
    return ", ".join(parts)


def shown(text: str) -> str:
    """A model's text for a terminal, which would obey control characters: they become U+FFFD."""
    return "".join(
        "\ufffd" if unicodedata.category(letter) == "Cc" and letter not in "\n\t" else letter for letter in text
    )


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
