"""A cluster in mid-run: every instance has reported, jobs are under way, and the directory is full."""

from __future__ import annotations

import numpy as np

from mcjax.cost import catalogue
from mcjax.cost.choose import automatic
from mcjax.cost.memory import kv_capacity_tokens
from mcjax.sched.reports import load_report
from mcjax.sched.state import ClusterState, LinkEstimate
from mcjax.types import NS_PER_S, Request, Role

BLOCK_TOKENS = 512
ROOT, GROUP, SESSION, NEW = 1, 7, 24, 4
"""Blocks of a chain: one that every prompt begins with, a shared prompt, a conversation, and what nobody has yet."""
GROUPS = 1000
GROUP_NODES, SESSION_NODES = 20, 2
UNDER_WAY = 2
"""Jobs placed on each prefill instance that no report shows yet."""


class FullCluster:
    """Half the instances prefill, half decode, each on a node of its own.

    The first block is on every node, a shared prompt on 20 nodes, a conversation on two (where it was computed and
    where it was decoded). Block ids are dense integers, as in a run. Prompts have 24 blocks on average, as many as
    those of Mooncake's conversation trace.
    """

    def __init__(self, instances: int, blocks: int, seed: int = 0):
        self._rng = np.random.default_rng(seed)
        model, hardware = catalogue.model("llama3-70b"), catalogue.hardware("h800x8")
        link = LinkEstimate(hardware.nic_bytes_per_s, hardware.nic_latency_ns / NS_PER_S)
        self.state = ClusterState(automatic(model, hardware), link, model.kv_bytes_per_token, BLOCK_TOKENS)
        self.now_ns = 60 * NS_PER_S
        self.groups = max(1, min(GROUPS, blocks // (10 * GROUP)))
        self.sessions = max(1, (blocks - ROOT - self.groups * GROUP) // SESSION)
        self._next_block = ROOT + self.groups * GROUP + self.sessions * SESSION
        free_tokens = kv_capacity_tokens(model, hardware)
        prefill = instances // 2
        for index in range(instances):
            name, role = (f"p{index}", Role.PREFILL) if index < prefill else (f"d{index - prefill}", Role.DECODE)
            self.state.join(name, f"node-{name}", role, free_tokens)
        self._fill(instances)
        self._report(free_tokens)
        for request, prompt in self.prompts(UNDER_WAY * prefill, first_id=10**9):
            at = request.request_id % prefill
            self.state.assign(request.request_id, at, prefill + at, NS_PER_S // 20, request.prompt_tokens, prompt)

    def _fill(self, nodes: int) -> None:
        directory, rng = self.state.directory, self._rng
        for node in range(nodes):
            directory.add(node, range(ROOT))
        for group in range(self.groups):
            for node in rng.choice(nodes, min(GROUP_NODES, nodes), replace=False).tolist():
                directory.add(node, self._group(group))
        where = rng.integers(0, nodes, (self.sessions, SESSION_NODES)).tolist()
        for session, holders in enumerate(where):
            blocks = self._session(session)
            for node in holders:
                directory.add(node, blocks)

    def _group(self, group: int) -> range:
        return range(ROOT + group * GROUP, ROOT + (group + 1) * GROUP)

    def _session(self, session: int) -> range:
        first = ROOT + self.groups * GROUP + session * SESSION
        return range(first, first + SESSION)

    def _report(self, free_tokens: int) -> None:
        rng, tick_ns = self._rng, self.now_ns - NS_PER_S // 20
        rows: list[list[int]] = []
        for member in self.state.members.values():
            batch = 0 if member.role is Role.PREFILL else int(rng.integers(0, 64))
            queue_ns = int(rng.exponential(NS_PER_S)) if member.role is Role.PREFILL else 0
            outgoing = int(rng.integers(0, 2)) * int(rng.exponential(1e9))
            load = [0, queue_ns, batch, batch * 6000, free_tokens - batch * 6000, outgoing]
            rows.append([member.index, tick_ns, *load])
        self.state.fold(load_report(tick_ns, rows))

    def prompts(self, count: int, first_id: int = 0) -> list[tuple[Request, tuple[int, ...]]]:
        """Continued conversations: the first block, a shared prompt, some of a conversation, and new blocks."""
        made: list[tuple[Request, tuple[int, ...]]] = []
        for index in range(count):
            session = int(self._rng.integers(self.sessions))
            known = self._session(session)[: int(self._rng.integers(0, SESSION + 1))]
            new = range(self._next_block, self._next_block + NEW)
            self._next_block += NEW
            blocks = (*range(ROOT), *self._group(session % self.groups), *known, *new)
            tokens = len(blocks) * BLOCK_TOKENS + int(self._rng.integers(0, BLOCK_TOKENS))
            made.append((Request(first_id + index, self.now_ns, tokens, max_tokens=2048), blocks))
        return made
