"""Every order is answered once, whatever becomes of the worker, and nobody waits for one that does not read."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from mcjax.backends.processes.channel import STEP, Channel
from mcjax.backends.processes.frames import Frames, Message, encode

DEADLINE_S = 20.0


class Ends:
    """A channel with the other end of its socket in the test's hands."""

    def __init__(self, silence_s: float = DEADLINE_S):
        ours, self.theirs = socket.socketpair()
        self.theirs.settimeout(DEADLINE_S)
        self.log: list[object] = []
        self.over = threading.Event()
        self._frames = Frames()
        self.channel = Channel("p0", ours, silence_s, self._ended, self.log.append)

    def _ended(self, why: str) -> None:
        self.log.append(why)
        self.over.set()

    def arrived(self, count: int) -> list[Message]:
        found: list[Message] = []
        while len(found) < count:
            piece = self.theirs.recv(1 << 20)
            assert piece
            found += self._frames.feed(piece)
        return found

    def say(self, kind: str, **values: object) -> None:
        self.theirs.sendall(encode(Message(kind, values)))


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.channel.close()
    made.theirs.close()


def wait_for(what: object, condition) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.005)


def test_answers_find_who_asked(ends: Ends) -> None:
    answers: dict[str, list[Message | None]] = {"a": [], "b": []}
    steps: list[Message | None] = []
    first = ends.channel.ask("run", {"x": 1}, answers["a"].append, [b"raw"], steps.append)
    second = ends.channel.ask("copy", {}, answers["b"].append)
    ends.channel.send("interrupt", {"run": first})
    asked = ends.arrived(3)
    assert [message.kind for message in asked] == ["run", "copy", "interrupt"]
    assert asked[0].values == {"x": 1, "order": first}
    assert asked[0].buffers == (b"raw",)
    ends.say("copied", order=second)
    ends.say(STEP, order=first, step=0)
    ends.say(STEP, order=first, step=1)
    ends.say("progress", order=first)
    ends.say(STEP, order=first, step=2)  # too late: nobody waits for it
    ends.say("progress", order=first)  # twice
    ends.say("stage", what="ready")
    wait_for("the message", lambda: ends.log)
    assert [message and message.kind for message in (*answers["a"], *answers["b"])] == ["progress", "copied"]
    assert [step and step.values["step"] for step in steps] == [0, 1]
    assert [message.values for message in ends.log if isinstance(message, Message)] == [{"what": "ready"}]


def test_whoever_waits_is_told_that_the_worker_is_gone_after_its_end_is_noticed(ends: Ends) -> None:
    for number in range(3):
        ends.channel.ask("run", {}, lambda message, number=number: ends.log.append((number, message)))
    ends.arrived(3)
    ends.theirs.close()
    wait_for("the answers", lambda: len(ends.log) == 4)
    assert ends.log == ["its process is gone", (0, None), (1, None), (2, None)]
    ends.channel.ask("run", {}, lambda message: ends.log.append(("late", message)))
    assert ends.log[-1] == ("late", None), "an order to the dead is answered at once"
    ends.channel.send("interrupt")


@pytest.mark.parametrize("garbage", [b"garbage, and quite a lot of it", encode(Message("x"))[:-2] + b"xx"])
def test_garbage_is_its_end(ends: Ends, garbage: bytes) -> None:
    ends.theirs.sendall(garbage)
    assert ends.over.wait(DEADLINE_S)
    assert "it sent no message" in str(ends.log[0])


def test_an_answer_that_cannot_be_used_is_its_end(ends: Ends) -> None:
    heard: list[Message | None] = []

    def read(message: Message | None) -> None:
        heard.append(message)
        if message is not None:
            raise KeyError("answer")

    ends.channel.ask("run", {}, read)
    ends.say("progress", order=0)
    assert ends.over.wait(DEADLINE_S)
    assert "could not be used (KeyError" in str(ends.log[0])
    assert len(heard) == 1


def test_silence_is_its_end() -> None:
    ends = Ends(silence_s=0.5)
    answers: list[Message | None] = []
    ends.channel.ask("run", {}, answers.append)
    said_s, longest_s = time.monotonic(), 0.0
    for _ in range(20):
        time.sleep(0.05)
        ends.say("beat")
        longest_s, said_s = max(longest_s, time.monotonic() - said_s), time.monotonic()
    assert not ends.over.is_set() or longest_s > 0.25, "it was heard all the time, unless the machine stood still"
    assert ends.over.wait(DEADLINE_S)
    wait_for("the answer", lambda: answers)
    assert ends.log[-1] == "it said nothing for 0.5 s"
    assert answers == [None]
    ends.channel.close()
    ends.theirs.close()


def test_who_sends_to_one_that_does_not_read_never_waits(ends: Ends) -> None:
    large = [os.urandom(1 << 20)]
    began_s = time.monotonic()
    for number in range(16):
        ends.channel.ask("run", {"number": number}, lambda message: None, large)
    assert time.monotonic() - began_s < DEADLINE_S / 2, "a sender waited for the other side"
    arrived = ends.arrived(16)  # and nothing is lost, nor out of order
    assert [message.values["number"] for message in arrived] == list(range(16))
    assert all(message.buffers == tuple(large) for message in arrived)


def test_an_end_that_was_asked_for_is_no_death(ends: Ends) -> None:
    ends.channel.last("end")
    assert ends.arrived(1)[0].kind == "end"
    answers: list[Message | None] = []
    ends.channel.ask("figures", {}, answers.append)
    ends.theirs.close()
    wait_for("the answer", lambda: answers == [None])
    assert ends.log == []


def test_closing_leaves_no_thread_and_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        ends = Ends()
        answers: list[Message | None] = []
        ends.channel.ask("run", {}, answers.append)
        ends.channel.close()
        ends.channel.close()
        assert answers == [None]
        assert ends.log == []
        ends.theirs.close()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
