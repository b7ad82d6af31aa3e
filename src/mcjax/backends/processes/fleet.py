"""The workers of a run: started side by side, made known to each other, ended together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcjax.backends.processes.channel import Channel
from mcjax.backends.processes.member import Member, Stage
from mcjax.engine.cluster_spec import node_of
from mcjax.errors import DeadlineExceeded, RunError
from mcjax.transfer.transports.secret import Secret
from mcjax.types import Role

PATIENCE_S = 10.0
"""For a worker's last words."""
FEW_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""For libraries that would start a thread a core in each of many processes. XLA's own pool is as it is."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How workers are started, and when they are given up: keys of `conf/launcher/processes.yaml`."""

    transport: str
    command: Mapping[str, str]
    host: Mapping[str, str]
    silence_s: float
    restart: bool


class Fleet:
    """Every worker that there ever was in a run, by name, and the way to each by its node."""

    def __init__(
        self,
        settings: Settings,
        config: Mapping[str, Any],
        on_compiled: Callable[[Mapping[str, Any]], None],
        on_death: Callable[[str, str], None],
    ):
        """`config`: what all workers host alike; the others as `Member` has them."""
        self.members: dict[str, Member] = {}
        self.channels: dict[str, Channel] = {}
        self._settings = settings
        self._config = config
        self._secret = Secret.random()
        self._on_compiled = on_compiled
        self._on_death = on_death

    def start(self, name: str, role: Role, on_stage: Stage, of: str = "") -> Member:
        """Start a worker; `of`: whose place it takes, and whose command line and host it gets."""
        settings, place = self._settings, of or name
        member = Member(
            name,
            node_of(name),
            role,
            settings.command.get(place, ""),
            settings.silence_s,
            on_stage,
            self._on_compiled,
            self._on_death,
            {**FEW_THREADS, **os.environ},
            place,
        )
        self.members[name] = member
        self.channels[member.node] = member.channel
        host = settings.host.get(place, "127.0.0.1")
        member.start({**self._config, "transport": settings.transport, "host": host}, self._secret)
        return member

    def introduce(self, member: Member) -> None:
        """Tell a worker that is ready how to reach the host memory of all others that are, and them of its own."""
        for other in self.members.values():
            if other is not member and other.facts:
                other.tell_of(member)
                member.tell_of(other)

    async def last_words(self) -> None:
        """Have every worker that is ready say how it did. One that does not answer is killed."""
        for member in self.members.values():
            if member.facts and member.figures is None and not member.channel.ended:
                try:
                    member.figures = await member.ask("figures", patience_s=PATIENCE_S)
                except (RunError, DeadlineExceeded):
                    member.kill()

    def end(self, at_once: bool = False) -> None:
        """End them all. Blocks; leaves no process, thread or descriptor. Harmless when repeated."""
        for member in self.members.values():
            member.kill() if at_once or not member.facts else member.ask_to_end()  # then each is waited for
        for member in self.members.values():
            member.end()
