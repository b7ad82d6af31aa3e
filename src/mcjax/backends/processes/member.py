"""One worker as its controller knows it: process, channel, what it said of itself, whether it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from mcjax import aio
from mcjax.backends.answers import post
from mcjax.backends.processes.channel import Channel
from mcjax.backends.processes.frames import Message
from mcjax.backends.processes.spawn import WorkerProcess
from mcjax.errors import RunError
from mcjax.transfer.transports.secret import Secret
from mcjax.types import NS_PER_S, Role

END_S = 10.0
"""How long a worker may take to end in an orderly way."""
BEATS = 5
"""A worker is heard so many times in the time after whose silence it is given up."""

Stage = Callable[[str, str, float], None]


class Member:
    """A worker of a run, from its start to its end. Made on the run's loop.

    `on_stage(name, what, share_done)` hears of its preparation, `on_compiled(payload)` of programs that it compiled too
    late, `on_death(name, why)` of its end, if nobody asked for it: each as a wake-up of the loop.
    """

    def __init__(
        self,
        name: str,
        node: str,
        role: Role,
        prefix: str,
        silence_s: float,
        on_stage: Stage,
        on_compiled: Callable[[Mapping[str, Any]], None],
        on_death: Callable[[str, str], None],
        environment: Mapping[str, str],
        place: str,
    ):
        self.name = name
        self.place = place
        """The name of the first that had its place: its own, unless it took over from one that died."""
        self.node = node
        self.role = role
        self.facts: Mapping[str, Any] = {}
        """What it said of itself when it was ready."""
        self.figures: Mapping[str, Any] | None = None
        """What it said of its work, at the end."""
        self.death = ""
        """Why it is gone, if it went by itself."""
        self._clock = aio.clock()
        self._ready: asyncio.Future[None] = aio.new_future()
        self._on_stage = on_stage
        self._on_compiled = on_compiled
        self._on_death = on_death
        self._silence_s = silence_s
        self.process = WorkerProcess(name, prefix, environment, place)
        self.channel = Channel(name, self.process.socket, silence_s, self._ended, self._heard)

    def start(self, config: Mapping[str, Any], secret: Secret) -> None:
        """Tell it what to host. The secret goes through the socket that only the two processes have."""
        values = {**config, "name": self.name, "node": self.node, "role": self.role.value}
        values["beat_s"] = self._silence_s / BEATS
        self.channel.send("start", values, [secret.hand_over()])

    def tell_of(self, other: Member) -> None:
        """Say how to reach the host memory of another, which is ready."""
        region = {name: other.facts[name] for name in ("region", "stride_bytes")}
        self.channel.send("peer", {"node": other.node, **region})

    async def ready(self) -> None:
        """Wait until it is. Raises `RunError`, with what it said, if it cannot be."""
        await self._ready

    async def ask(self, kind: str, values: Mapping[str, Any] | None = None, patience_s: float | None = None) -> Any:
        """The answer to an order. Raises `RunError` if the worker goes first, `DeadlineExceeded` after `patience_s`."""
        future: asyncio.Future[Message | None] = aio.new_future()
        clock = self._clock

        def deliver(message: Message | None) -> None:
            if not future.done():
                future.set_result(message)

        self.channel.ask(kind, values or {}, lambda message: post(clock, deliver, message))
        if patience_s is None:
            message = await future
        else:
            message = await aio.within(clock.now_ns() + round(patience_s * NS_PER_S), future)
        if message is None:
            raise RunError(f"{self.name}: {self.death or 'its process was ended'}")
        return message.values["answer"]

    def ask_to_end(self) -> None:
        """Say so, and wait for nothing."""
        if not self.channel.ended:
            self.channel.last("end")

    def kill(self) -> None:
        """End it by force; that is not its death."""
        self.ask_to_end()
        self.process.kill()

    def end(self, patience_s: float = END_S) -> None:
        """Have it end, by force if need be. Blocks; leaves no process, thread or descriptor. Harmless when repeated."""
        self.ask_to_end()
        self.process.end(patience_s)
        self.channel.close()

    # On the channel's thread

    def _heard(self, message: Message) -> None:
        values = message.values
        if message.kind == "ready":
            post(self._clock, self._is_ready, values)
        elif message.kind == "stage":
            post(self._clock, self._on_stage, self.name, values["what"], values["share_done"])
        elif message.kind == "refused":
            post(self._clock, self._failed, str(values["why"]))
        elif message.kind == "compiled":
            post(self._clock, self._on_compiled, values)

    def _ended(self, why: str) -> None:
        """Whatever it was: it does nothing more from here on, and then its death is told."""
        self.process.kill()
        self.death = f"{why}; {self.process.death()}"
        post(self._clock, self._is_dead)

    # On the loop

    def _is_ready(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        if not self._ready.done():
            self._ready.set_result(None)

    def _failed(self, why: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(RunError(f"{self.name} cannot be: {why}"))
            self._ready.exception()  # of several that fail, one is told of

    def _is_dead(self) -> None:
        self._failed(self.death)
        self._on_death(self.name, self.death)
