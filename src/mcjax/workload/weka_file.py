"""Reads Weka traces of agentic coding: conversations whose requests start sub-agents, with ids of what they sent."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path

from mcjax.errors import ConfigError, TraceError
from mcjax.types import NS_PER_S
from mcjax.workload.files import MAX_SECONDS, JsonLine, JsonObject, contents, json_lines, shown

MAX_ID = 2**128 - 1
SUBAGENT = "subagent"
TYPES = ("n", "s", SUBAGENT)
BACKGROUND = "async_launched"
"""The status of a sub-agent that its parent did not wait for."""


@dataclass(slots=True)
class Call:
    """One request. Its prompt's blocks are `node` and the `blocks - 1` nodes above it.

    `think_ns`: for a conversation's first request 0; for a sub-agent's first one the time since the request that
    started it ended; else the time since the request before, and the sub-agents that were waited for, had ended.
    """

    input_tokens: int
    output_tokens: int
    node: int
    blocks: int
    think_ns: int
    children: list[Agent] = field(default_factory=list["Agent"])
    background: list[Agent] = field(default_factory=list["Agent"])


@dataclass(slots=True)
class Agent:
    """A conversation, or a sub-agent: at least one request. `name` is its id in the file."""

    name: str
    calls: list[Call] = field(default_factory=list[Call])


@dataclass(slots=True)
class Corpus:
    """Conversations, and their blocks as a forest: `above[node]` is the block before (-1: none).

    Prompts of a conversation mostly grow, so a trace of 200 million ids has few million nodes.
    """

    block_tokens: int = 0
    agents: list[Agent] = field(default_factory=list[Agent])
    above: array[int] = field(default_factory=lambda: array("q"))

    def block_ids(self, call: Call) -> tuple[int, ...]:
        """One id a block; it stands for the block and everything before it."""
        ids = [0] * call.blocks
        node = call.node
        for index in reversed(range(call.blocks)):
            ids[index] = node
            node = self.above[node]
        return tuple(ids)

    def append(self, after: int) -> int:
        """A new block behind `after`."""
        self.above.append(after)
        return len(self.above) - 1


def read(path: Path, limit: int | None = None) -> tuple[Corpus, dict[str, str]]:
    """The first `limit` conversations (all if None), and the sha256 of each file read.

    A `.json` file is one conversation, any other file one a line; a folder is its `.json` files, by name. Raises
    `ConfigError`, or `TraceError` for the first thing wrong, naming file, line and field.
    """
    corpus, inputs = Corpus(), dict[str, str]()
    shared: dict[tuple[int, int], int] = {}
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ConfigError("workload.path", str(path), "holds no .json files, which would be a conversation each")
    for file in files:
        if limit is not None and len(corpus.agents) >= limit:
            break
        lines, inputs[str(file)] = contents(file)
        whole = file.suffix == ".json"
        for line in [JsonLine(str(file), 1, b"\n".join(lines))] if whole else json_lines(lines, str(file)):
            if limit is None or len(corpus.agents) < limit:
                _append(corpus, line, shared)
    if not corpus.agents:
        raise TraceError(str(path), 1, "requests", "the file holds no conversations")
    return corpus, inputs


def _append(corpus: Corpus, line: JsonLine, shared: dict[tuple[int, int], int]) -> None:
    """Add the conversation of `line`. `shared`: nodes of ids that mean the same in every conversation."""
    block_tokens = line.whole("block_size", 1)
    if corpus.block_tokens not in (0, block_tokens):
        raise line.error("block_size", f"is {block_tokens}, but the first conversation's is {corpus.block_tokens}")
    corpus.block_tokens = block_tokens
    scope = line.text("hash_id_scope", "local")
    if scope not in ("local", "global"):
        raise line.error("hash_id_scope", f"must be local or global, not {shown(scope)}")
    reader = _Reader(corpus, shared if scope == "global" else {})
    calls, _ = reader.calls(line.objects("requests"), 0, None)
    if not calls:
        raise line.error("requests", "is empty")
    corpus.agents.append(Agent(line.text("id", f"conversation-{len(corpus.agents)}"), calls))


class _Reader:
    """Reads the requests of one conversation. `known`: (the block before, an id) -> its node."""

    def __init__(self, corpus: Corpus, known: dict[tuple[int, int], int]):
        self._corpus = corpus
        self._known = known
        self._ids: list[int] = []
        self._nodes: list[int] = []
        """Of the last prompt."""

    def calls(self, entries: list[JsonObject], began_ns: int, after_ns: int | None) -> tuple[list[Call], int]:
        """The requests of a conversation (`after_ns` None), and when they were over.

        Or of a sub-agent that began at `began_ns`; the request that started it was over at `after_ns`.
        """
        calls: list[Call] = []
        over_ns = free_ns = after_ns or 0  # of the last request; and of what it started, if the next one waits for it
        waited = False
        for entry in _request_first(entries):
            at_ns = entry.seconds_ns("t")
            if at_ns < began_ns:  # some captures count a sub-agent's times from its own beginning
                at_ns += began_ns
            if entry.fields["type"] == SUBAGENT:
                ended_ns = self._subagent(entry, at_ns, over_ns, calls[-1])
                if ended_ns is not None:
                    free_ns, waited = max(free_ns, ended_ns), True
                continue
            call = self._call(entry)
            think_ns = _duration_ns(entry, "think_time")
            if not calls and after_ns is None:
                think_ns = 0
            elif think_ns is None or not calls or waited:
                think_ns = max(0, at_ns - free_ns)
            call.think_ns = think_ns
            calls.append(call)
            over_ns = free_ns = at_ns + (_duration_ns(entry, "api_time") or 0)
            waited = False
        return calls, free_ns

    def _subagent(self, entry: JsonObject, at_ns: int, after_ns: int, parent: Call) -> int | None:
        """Add a sub-agent to the request that started it; when it ended, or None if nobody waited for that."""
        calls, ended_ns = self.calls(entry.objects("requests"), at_ns, after_ns)
        duration_ns = _duration_ns(entry, "duration_ms", NS_PER_S // 1000)
        background = entry.text("status", "") == BACKGROUND
        if calls:
            name = entry.text("agent_id", f"agent-{len(parent.children) + len(parent.background)}")
            (parent.background if background else parent.children).append(Agent(name, calls))
        if background:
            return None
        return max(at_ns, ended_ns) if duration_ns is None else at_ns + duration_ns

    def _call(self, entry: JsonObject) -> Call:
        corpus = self._corpus
        input_tokens, output_tokens = entry.whole("in", 1), entry.whole("out", 0)
        ids = entry.wholes("hash_ids", MAX_ID) if "hash_ids" in entry.fields else []
        full, most = input_tokens // corpus.block_tokens, -(-input_tokens // corpus.block_tokens)
        if len(ids) > most:
            problem = f"has {len(ids)} ids, but {input_tokens} tokens make {most} blocks of {corpus.block_tokens}"
            raise entry.error("hash_ids", problem)
        node = self._node(ids)
        for _ in range(len(ids), full):  # blocks without an id are like no other
            node = corpus.append(node)
        return Call(input_tokens, output_tokens, node, max(len(ids), full), 0)

    def _node(self, ids: list[int]) -> int:
        """The node of the last of `ids`; -1 of none."""
        same = min(len(ids), len(self._ids))
        if ids[:same] != self._ids[:same]:  # mostly they are: a prompt is the last one and something more
            same = 0
        nodes = self._nodes[:same]
        node = nodes[-1] if nodes else -1
        for block in ids[same:]:
            found = self._known.get((node, block))
            if found is None:
                found = self._known[node, block] = self._corpus.append(node)
            node = found
            nodes.append(node)
        self._ids, self._nodes = ids, nodes
        return node


def _request_first(entries: list[JsonObject]) -> list[JsonObject]:
    """The entries in their order; but sub-agents recorded before the first request are started by it."""
    for entry in entries:
        if entry.value("type") not in TYPES:
            raise entry.error("type", f"must be one of {', '.join(TYPES)}, not {shown(entry.value('type'))}")
    first = next((index for index, entry in enumerate(entries) if entry.fields["type"] != SUBAGENT), None)
    if first is None and entries:
        raise entries[0].error("type", "is a sub-agent, but there is no request of type n or s that could start it")
    return entries if not first else [entries[first], *entries[:first], *entries[first + 1 :]]


def _duration_ns(entry: JsonObject, name: str, unit_ns: int = NS_PER_S) -> int | None:
    """None if the field is absent or null. Captures hold negative ones, where requests overlapped: they count as 0."""
    value = entry.fields.get(name)
    if value is None:
        return None
    if type(value) not in (int, float):
        raise entry.error(name, f"must be a number, not {shown(value)}")
    if not abs(value) * unit_ns <= MAX_SECONDS * NS_PER_S:  # also refuses NaN
        raise entry.error(name, f"must lie within {MAX_SECONDS} s, not {shown(value)}")
    return max(0, round(value * unit_ns))
