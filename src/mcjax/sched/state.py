"""The conductor's picture of the cluster: reports folded in, plus its own decisions that no report shows yet.

It is a function of the sequence of calls made to it, and every call is one row of the journal (`reports.parquet`), so
the picture at any decision of any run can be rebuilt from the run's own log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from mcjax.cost.base import CostModel
from mcjax.kvpool.directory import Directory
from mcjax.sched.reports import BLOCKS_ADDED, BLOCKS_REMOVED, LOAD, LOAD_COLUMNS, SSD_ADDED, SSD_QUEUE, Report
from mcjax.sched.view import ClusterView, DecodeColumns, SSDColumns
from mcjax.types import BlockId, Role, Tier

COLUMNS = ("tick_ns", *LOAD_COLUMNS, "pending_ns", "pending_sequences", "pending_tokens")
"""What the state keeps of each instance: its last report, and of the jobs it has not reported yet their prompt work,
sequences and tokens."""

TICK_NS, _, QUEUE_NS, BATCH, CONTEXT_TOKENS, FREE_TOKENS, OUTGOING_BYTES = range(1 + len(LOAD_COLUMNS))
PENDING_NS, PENDING_SEQUENCES, PENDING_TOKENS = range(1 + len(LOAD_COLUMNS), len(COLUMNS))


@dataclass(slots=True, eq=False)
class Member:
    """An instance that has joined; `index` is its column for the whole run, and its number on the report bus."""

    name: str
    node: str
    node_index: int
    role: Role
    index: int
    draining: bool = False
    gone: bool = False
    sent: int = 0


@dataclass(slots=True, eq=False)
class Assignment:
    """A job placed and not yet settled. A share is pending until the instance reports that it has taken the job on."""

    request_id: int
    prefill: Member
    decode: Member
    prefill_ns: int
    context_tokens: int
    blocks: Sequence[BlockId]
    prefill_pending: bool = True
    decode_pending: bool = True


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """What estimates assume of a node's network link, or of its SSD."""

    bytes_per_s: float
    latency_s: float


def ssd_estimate(found: tuple[float, float] | None) -> LinkEstimate | None:
    """What a world says of its SSDs, if it has any."""
    return None if found is None else LinkEstimate(*found)


class ClusterState:
    """Columns by instance; a view takes the rows that are eligible."""

    def __init__(
        self,
        cost: CostModel,
        link: LinkEstimate,
        bytes_per_token: int,
        block_tokens: int,
        ssd: LinkEstimate | None = None,
    ):
        self.directory = Directory()
        """Of host memories."""
        self.ssd_directory = Directory()
        self.members: dict[str, Member] = {}
        self.cost = cost
        self.link = link
        self.ssd = ssd
        self.bytes_per_token = bytes_per_token
        self.block_tokens = block_tokens
        self._all: list[Member] = []
        self._node_members: dict[str, int] = {}
        self._ssd_queues = np.zeros(0, np.int64)  # bytes, by the node's index
        self._assignments: dict[int, Assignment] = {}
        self._unreported: list[deque[tuple[int, Assignment]]] = []
        self._fading: list[deque[tuple[int, Sequence[BlockId]]]] = []
        self._columns = np.zeros((len(COLUMNS), 0), np.int64)  # one row a quantity, so that a view takes rows at once
        self._prefill = _rows([])
        self._decode = _rows([])
        self._prefill_nodes = _rows([])
        self._prefill_names: tuple[str, ...] = ()
        self._prefill_node_names: tuple[str, ...] = ()
        self._decode_names: tuple[str, ...] = ()

    # Membership

    def join(self, name: str, node: str, role: Role, free_tokens: int) -> Member:
        member = Member(name, node, self.directory.node_index(node), role, len(self._all))
        self.ssd_directory.node_index(node)  # the same one: both hear of nodes here first
        self.members[name] = member
        self._all.append(member)
        self._node_members[node] = self._node_members.get(node, 0) + 1
        self._unreported.append(deque())
        while len(self._fading) <= member.node_index:
            self._fading.append(deque())
            self._ssd_queues = np.append(self._ssd_queues, 0)
        self._columns = np.append(self._columns, np.zeros((len(COLUMNS), 1), np.int64), axis=1)
        self._columns[FREE_TOKENS, member.index] = free_tokens
        self._eligible()
        return member

    def drain(self, name: str) -> None:
        """No new jobs for this instance."""
        self.members[name].draining = True
        self._eligible()

    def leave(self, name: str) -> None:
        """The instance is gone, and its node's memory with it."""
        member = self.members.pop(name)
        member.gone = True
        self._node_members[member.node] -= 1
        if not self._node_members[member.node]:
            del self._node_members[member.node]
            self._ssd_queues[member.node_index] = 0
            self.directory.drop_node(member.node_index)
            self.ssd_directory.drop_node(member.node_index)
            for assignment in self._assignments.values():
                if assignment.prefill.node == member.node:
                    self._fade(assignment, 0)
            self._faded(member.node_index)
        self._eligible()

    def placed_on(self, name: str) -> int:
        """Assignments that have not settled and have either side on this instance."""
        return sum(name in (a.prefill.name, a.decode.name) for a in self._assignments.values())

    def _eligible(self) -> None:
        open_members = [member for member in self.members.values() if not member.draining]
        prefill = [member for member in open_members if member.role is not Role.DECODE]
        decode = [member for member in open_members if member.role is Role.DECODE]
        self._prefill = _rows([member.index for member in prefill])
        self._prefill_nodes = _rows([member.node_index for member in prefill])
        self._prefill_names = tuple(member.name for member in prefill)
        self._prefill_node_names = tuple(member.node for member in prefill)
        self._decode = _rows([member.index for member in decode])
        self._decode_names = tuple(member.name for member in decode)

    # Reports

    def fold(self, report: Report) -> None:
        if report.kind != LOAD:
            if report.source not in self._node_members:
                return  # a late report of a node that is gone
            node = self.directory.node_index(report.source)
            if report.kind == SSD_QUEUE:
                self._ssd_queues[node] = report.values[0]
                return
            directory = self.directory if report.kind in (BLOCKS_ADDED, BLOCKS_REMOVED) else self.ssd_directory
            if report.kind in (BLOCKS_ADDED, SSD_ADDED):
                directory.add(node, report.values)
            else:
                directory.remove(node, report.values)
            return
        rows = np.asarray(report.values).reshape(-1, 2 + len(LOAD_COLUMNS))
        self._columns[: 1 + len(LOAD_COLUMNS), rows[:, 0]] = rows[:, 1:].T
        for number, tick_ns, accepted in cast("list[list[int]]", rows[:, :3].tolist()):
            self._reported(self._all[number], tick_ns, accepted)

    def _reported(self, member: Member, tick_ns: int, accepted: int) -> None:
        """As of `tick_ns` an instance had accepted so many jobs: those are in its own columns now."""
        if member.gone:
            return
        unreported = self._unreported[member.index]
        while unreported and unreported[0][0] <= accepted:
            assignment = unreported.popleft()[1]
            if member is assignment.prefill:
                self._unpend_prefill(assignment)
            if member is assignment.decode:
                self._unpend_decode(assignment)
        if self._fading[member.node_index]:
            self._faded(member.node_index, tick_ns)

    def _faded(self, node: int, tick_ns: int | None = None) -> None:
        """Drop what was expected until the report of `tick_ns` (None: altogether)."""
        fading = self._fading[node]
        while fading and (tick_ns is None or fading[0][0] < tick_ns):
            self.directory.unexpect(node, fading.popleft()[1])

    def _unpend_prefill(self, assignment: Assignment) -> None:
        if assignment.prefill_pending:
            assignment.prefill_pending = False
            self._columns[PENDING_NS, assignment.prefill.index] -= assignment.prefill_ns

    def _unpend_decode(self, assignment: Assignment) -> None:
        if assignment.decode_pending:
            assignment.decode_pending = False
            self._columns[PENDING_SEQUENCES, assignment.decode.index] -= 1
            self._columns[PENDING_TOKENS, assignment.decode.index] -= assignment.context_tokens

    # Own decisions

    def assign(
        self,
        request_id: int,
        prefill: int,
        decode: int,
        prefill_ns: int,
        context_tokens: int,
        blocks: Sequence[BlockId],
    ) -> None:
        """A job was placed and sent to its prefill instance."""
        first, second = self._all[prefill], self._all[decode]
        assignment = Assignment(request_id, first, second, prefill_ns, context_tokens, blocks)
        self._assignments[request_id] = assignment
        self._send(first, assignment)
        self._columns[PENDING_NS, prefill] += prefill_ns
        self._columns[PENDING_SEQUENCES, decode] += 1
        self._columns[PENDING_TOKENS, decode] += context_tokens
        self.directory.expect(first.node_index, blocks)

    def hand_over(self, request_id: int, now_ns: int) -> None:
        """The prompt is done and the job was sent to its decode instance."""
        assignment = self._assignments[request_id]
        self._unpend_prefill(assignment)
        self._fade(assignment, now_ns)
        self._send(assignment.decode, assignment)

    def _send(self, member: Member, assignment: Assignment) -> None:
        member.sent += 1
        self._unreported[member.index].append((member.sent, assignment))

    def settle(self, request_id: int, now_ns: int) -> None:
        """The job has ended, or this attempt at it has."""
        assignment = self._assignments.pop(request_id)
        self._unpend_prefill(assignment)
        self._unpend_decode(assignment)
        self._fade(assignment, now_ns)

    def _fade(self, assignment: Assignment, now_ns: int) -> None:
        """Its blocks are resident by now, or never will be: expect them only until the next report of that node."""
        if not assignment.blocks:
            return
        node = assignment.prefill.node_index
        self._fading[node].append((now_ns, assignment.blocks))
        assignment.blocks = ()
        if assignment.prefill.node not in self._node_members:
            self._faded(node)

    # Views

    def view(
        self, now_ns: int, prompt_tokens: int, blocks: Sequence[BlockId], expected_output_tokens: int = 0
    ) -> ClusterView:
        columns = self._columns[:, self._prefill]
        queue_ns = np.maximum(columns[QUEUE_NS] + columns[TICK_NS] - now_ns, 0) + columns[PENDING_NS]
        held = self.directory.prefix_blocks(blocks)
        held_tokens = held[self._prefill_nodes] * self.block_tokens
        available, ssd = int(held.max(initial=0)), None
        if self.ssd is not None and len(self.ssd_directory):
            on_ssd = self.ssd_directory.prefix_blocks(blocks)
            available = max(available, int(on_ssd.max(initial=0)))
            ssd = SSDColumns(
                tokens=np.maximum(on_ssd[self._prefill_nodes] * self.block_tokens - held_tokens, 0),
                queued_bytes=self._ssd_queues[self._prefill_nodes].copy(),
                bytes_per_s=self.ssd.bytes_per_s,
                latency_s=self.ssd.latency_s,
            )
        return ClusterView(
            time_ns=now_ns,
            prompt_tokens=prompt_tokens,
            expected_output_tokens=expected_output_tokens,
            block_tokens=self.block_tokens,
            names=self._prefill_names,
            nodes=self._prefill_node_names,
            queue_s=queue_ns / 1e9,
            prefix_tokens=held_tokens,
            available_tokens=available * self.block_tokens,
            outgoing_bytes=columns[OUTGOING_BYTES].copy(),
            decode=self._decode_columns(),
            cost=self.cost,
            bytes_per_token=self.bytes_per_token,
            network_bytes_per_s=self.link.bytes_per_s,
            network_latency_s=self.link.latency_s,
            ssd=ssd,
        )

    def _decode_columns(self) -> DecodeColumns:
        columns = self._columns[:, self._decode]
        pending_tokens = columns[PENDING_TOKENS]
        return DecodeColumns(
            names=self._decode_names,
            batch=columns[BATCH] + columns[PENDING_SEQUENCES],
            context_tokens=columns[CONTEXT_TOKENS] + pending_tokens,
            free_tokens=columns[FREE_TOKENS] - pending_tokens,
            cost=self.cost,
        )

    def step_estimate_s(self, member: Member, more_tokens: int) -> float:
        """Expected decode step of one instance with one more sequence of `more_tokens`."""
        column = self._columns[:, member.index]
        batch = column[BATCH] + column[PENDING_SEQUENCES] + 1
        context = column[CONTEXT_TOKENS] + column[PENDING_TOKENS] + more_tokens
        return float(self.cost.decode_s(np.array([batch]), np.array([context]))[0])

    # Replicas

    def replicas(self, blocks: Sequence[BlockId]) -> list[tuple[str, Tier]]:
        """Nodes and their tiers that are reported to hold every one of `blocks`: host memories before SSDs, each in
        order of joining."""
        nodes = {member.node_index: member.node for member in self.members.values()}
        tiers = ((self.directory, Tier.DRAM), (self.ssd_directory, Tier.SSD))
        return [
            (nodes[index], tier)
            for directory, tier in tiers
            if len(directory)
            for index in directory.holders_of(blocks)
            if index in nodes
        ]

    def placed_at(self, request_id: int) -> str | None:
        """The node that computes the prompt of a job which is placed and not settled."""
        assignment = self._assignments.get(request_id)
        return None if assignment is None else assignment.prefill.node

    def transfer_s(self, node: str, tier: Tier, to: str | None, tokens: int) -> float | None:
        """Expected time to get so many tokens from a tier of `node` into the host memory of the node `to`, behind what
        is queued there already: off the SSD first if that is where they are, then over the network unless that is the
        same node. None where nobody knows how quick the SSDs are."""
        nbytes, seconds = tokens * self.bytes_per_token, 0.0
        if tier is Tier.SSD:
            if self.ssd is None:
                return None
            queued = int(self._ssd_queues[self.directory.node_index(node)])
            seconds += self.ssd.latency_s + (nbytes + queued) / self.ssd.bytes_per_s
        if node != to:
            seconds += self.link.latency_s + (nbytes + self._outgoing_bytes(node)) / self.link.bytes_per_s
        return seconds

    def _outgoing_bytes(self, node: str) -> int:
        reported = (
            self._columns[OUTGOING_BYTES, member.index] for member in self.members.values() if member.node == node
        )
        return int(max(reported, default=0))


def _rows(indices: list[int]) -> slice | NDArray[np.int64]:
    """What picks these out of an array: a slice, which costs nothing, where they follow one another."""
    if indices and indices == list(range(indices[0], indices[0] + len(indices))):
        return slice(indices[0], indices[0] + len(indices))
    return np.array(indices, np.int64)
