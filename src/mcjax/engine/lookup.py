"""One request's search for its prefix: what each tier gave, and why it gave no more."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcjax.kvpool.gone import Gone
from mcjax.sched.job import Job, Placement
from mcjax.types import Miss


@dataclass(slots=True, eq=False)
class Lookup:
    """Counts in blocks, filled in as the search goes; `note` writes them into the request's row, in tokens.

    A block that lies in several tiers counts in the fastest one that served it.
    """

    job: Job
    placement: Placement
    block_tokens: int
    hbm: int = 0
    """Found in the instance's own device pages."""
    local: int = 0
    """Found in the node's own host memory, beyond those."""
    ssd: int = 0
    """Brought up from an SSD."""
    remote: int = 0
    """Pulled from another node's host memory."""
    _reasons: list[tuple[Miss, int]] = field(default_factory=list[tuple[Miss, int]], init=False)
    """Why blocks were not had, and up to which one that is why; later ones are about blocks behind."""
    _skip_reason: str = field(default="", init=False)

    @property
    def found(self) -> int:
        """Blocks that need not be computed."""
        return self.hbm + self.local + self.ssd + self.remote

    def on_device(self, blocks: int) -> None:
        """The first `blocks` blocks lie in the instance's own pages: what other tiers have of them was not needed."""
        self.hbm, over = blocks, blocks
        self.local, over = max(0, self.local - over), max(0, over - self.local)
        self.ssd, over = max(0, self.ssd - over), max(0, over - self.ssd)
        self.remote = max(0, self.remote - over)

    def failed(self, upto: int) -> None:
        """A tier or node that held blocks up to `upto` could not be read: an error, a lost lease, a wrong checksum."""
        self._reasons.append((Miss.FAULT, upto))

    def lossy(self, upto: int) -> None:
        """Blocks up to `upto` lie in a lossy encoding only, which the request does not accept."""
        self._reasons.append((Miss.LOSSY, upto))

    def skipped(self, upto: int, reason: str) -> None:
        """Blocks up to `upto` could have been brought, and were not: by decision, or for want of room or time."""
        self._reasons.append((Miss.SKIPPED, upto))
        self._skip_reason = self._skip_reason or reason

    def note(self, gone: Gone) -> None:
        """Write hits and misses into the row, once a request: what a later attempt finds may be its own doing."""
        row, size = self.job.row, self.block_tokens
        if row.routed_tokens is not None:
            return
        prompt_tokens = self.job.request.prompt_tokens
        routed, available = self.placement.reused_tokens, self.placement.available_tokens
        # The last block of a trace's prompt may be a part of one.
        device = min(self.hbm * size, prompt_tokens)
        local = min((self.hbm + self.local) * size, prompt_tokens)
        ssd = min((self.hbm + self.local + self.ssd) * size, prompt_tokens)
        found = min(self.found * size, prompt_tokens)
        row.hbm_tokens, row.local_tokens = device, local - device
        row.ssd_tokens, row.remote_tokens = ssd - local, found - ssd
        row.routed_tokens = min(routed, prompt_tokens)
        row.available_tokens = min(max(available, routed, found), prompt_tokens)
        row.missed_tokens = dict[Miss, int]() if found == prompt_tokens else self._missed(gone)
        row.skip_reason = self._skip_reason

    def _missed(self, gone: Gone) -> dict[Miss, int]:
        """Tokens behind the found prefix by cause: the reasons given, in order; beyond them what is known.

        What the placement expected here has left, or another request is computing it still. What it knew of and did not
        ask for lies elsewhere. The rest is remembered as gone, or nobody ever had it.
        """
        blocks, at, missed, size = self.job.blocks, self.found, dict[Miss, int](), self.block_tokens
        prompt_tokens = self.job.request.prompt_tokens

        def miss(cause: Miss, upto: int) -> None:
            nonlocal at
            if upto > at:
                tokens = min(upto * size, prompt_tokens) - at * size
                if tokens > 0:
                    missed[cause] = missed.get(cause, 0) + tokens
                at = upto

        for cause, upto in self._reasons:
            miss(cause, min(upto, len(blocks)))
        expected = self.placement.reused_tokens // size
        if expected > at:
            for cause in gone.causes(blocks[at:expected]):
                miss(cause, at + 1)
            miss(Miss.PENDING, expected)
        miss(Miss.ELSEWHERE, self.placement.available_tokens // size)
        for cause in gone.causes(blocks[at:]):
            miss(cause, at + 1)
        if at * size < prompt_tokens:
            missed[Miss.UNSEEN] = prompt_tokens - at * size
        return missed
