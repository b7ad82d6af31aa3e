"""Follows every block of a run through its events: by the log alone, where is it at any time?

`watch` notes how blocks were named, since of a span the log has but the first block's key and the count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from typing import Any

from mcjax.kvpool.keys import BlockNamer

Row = Mapping[str, Any]
Chain = tuple[str, ...]
POOL_KINDS = ("insert", "hit", "evict", "drop")
TIERS = ("hbm", "dram", "ssd")
COPIES = ("transfer", "transfer_failed")


class Names:
    """The chains into which prompts, and prompts with their outputs, were cut, as keys.

    A run that is verified is served again, with numbers of its own for blocks: those of the first time count.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.keys: dict[int, str] = {}
        self.chains: dict[Chain, None] = {}

    def add(self, namer: BlockNamer, blocks: tuple[int, ...]) -> tuple[int, ...]:
        for block in blocks:
            self.keys.setdefault(block, namer.table.key(block).hex())
        self.chains[tuple(namer.table.key(block).hex() for block in blocks)] = None
        return blocks

    def chain(self, blocks: tuple[int, ...]) -> Chain:
        return tuple(self.keys[block] for block in blocks)


def watch(patch: Any = setattr) -> Names:
    """Note every chain that is named from now on; `patch` sets an attribute."""
    names = Names()
    from_tokens, from_trace_ids = BlockNamer.from_tokens, BlockNamer.from_trace_ids
    patch(BlockNamer, "from_tokens", lambda self, *given: names.add(self, from_tokens(self, *given)))
    patch(BlockNamer, "from_trace_ids", lambda self, *given: names.add(self, from_trace_ids(self, *given)))
    return names


def follow(run: Any, names: Names) -> Counter[str]:
    """How often each kind of event came. Raises `AssertionError` for one that says too little, or does not follow."""
    prompts = {row["request_id"]: names.chain(tuple(row["blocks"])) for row in run.requests.to_pylist()}
    life = Life(names, prompts)
    counts: Counter[str] = Counter()
    # What is evicted, or dropped, at once may be several spans.
    events = run.events.to_pylist()
    for _, together in groupby(events, lambda row: (row["kind"], row["time_ns"], row["place"], row["tier"])):
        rows = list(together)
        kind = rows[0]["kind"]
        counts[kind] += len(rows)
        for row in rows:
            says_enough(row)
        if kind in POOL_KINDS and rows[0]["tier"] == "ssd":
            continue  # saved for nobody: which chain a span is of, where several begin alike, the row does not tell
        if kind in ("evict", "drop"):
            life.gone(rows)
        elif hasattr(life, kind):
            for row in rows:
                getattr(life, kind)(row)
    return counts


def says_enough(row: Row) -> None:
    kind, named = row["kind"], len(row["first_block"]) == 64
    if kind in POOL_KINDS:
        # What is saved is saved for nobody, and may then be found to be corrupt.
        assert row["request_id"] >= 0 or row["tier"] == "ssd" or kind == "drop", row
        assert (row["place"][:5], row["start_ns"]) == ("node-", -1), row
        assert row["tier"] in TIERS, row
        assert named, row
        assert row["blocks"] > 0 < row["bytes"], row
    elif kind in COPIES:
        assert row["request_id"] >= 0 or row["tier"] == "dram>ssd", row
        assert [place[:5] for place in row["place"].split(">")] == ["node-", "node-"], row
        assert set(row["tier"].split(">")) <= {*TIERS}, row
        assert 0 <= row["start_ns"] <= row["time_ns"], row
        assert row["blocks"] > 0 < row["bytes"], row
        assert row["detail"], row
        # No name: a prompt's last, partial block alone; a page copied before it is written into.
        assert named or row["blocks"] == 1 or row["tier"] == "hbm>hbm", row
    elif kind == "release":
        assert row["request_id"] >= 0, row
        assert (row["place"][:5], row["tier"]) == ("node-", "hbm"), row
        assert 0 <= row["start_ns"] <= row["time_ns"], row
        assert named == (row["blocks"] > 0) == (row["bytes"] > 0), row
    elif kind == "prefill_step":
        assert row["request_id"] >= 0, row
        assert row["tier"] == "hbm", row
        assert row["tokens"] > 0, row
        assert named == (row["blocks"] > 0), row


class Life:
    """What is where. A method a kind, which takes the row."""

    def __init__(self, names: Names, prompts: Mapping[int, Chain]):
        self._chains = list(names.chains)
        self._prompts = prompts
        self._pools: dict[tuple[str, str], dict[str, str | None]] = defaultdict(dict)
        """Node and tier -> blocks in that pool -> the block before each; parents come before children."""
        self._pages: dict[tuple[int, str], set[str]] = defaultdict(set)
        """Request and node -> blocks that it has computed or loaded there."""

    def _of(self, row: Row) -> Iterator[tuple[Chain, int]]:
        """Chains that a span may be of, and where it begins: the request's prompt, else one that continues it."""
        first, prompt = row["first_block"], self._prompts.get(row["request_id"], ())
        for chain in [prompt, *(chain for chain in self._chains if chain[: len(prompt)] == prompt)]:
            if first in chain and chain.index(first) + row["blocks"] <= len(chain):
                yield chain, chain.index(first)

    def insert(self, row: Row) -> None:
        pool = self._pools[row["place"], row["tier"]]
        for chain, at in self._of(row):
            parent, span = (chain[at - 1] if at else None), chain[at : at + row["blocks"]]
            if not any(key in pool for key in span):
                assert parent is None or parent in pool, f"without what it continues: {row}"
                pool.update({key: before for before, key in pairwise((parent, *span)) if key is not None})
                return
        raise AssertionError(f"inserted twice, or never named: {row}")

    def hit(self, row: Row) -> None:
        pool = self._pools[row["place"], row["tier"]]
        found = [chain[: row["blocks"]] for chain, at in self._of(row) if at == 0]
        there = [span for span in found if all(key in pool for key in span)]
        assert there, f"not there: {row}"
        if row["tier"] == "hbm":  # read in place
            self._pages[row["request_id"], row["place"]].update(there[0])

    def gone(self, rows: list[Row]) -> None:
        """Evicted, or dropped: the blocks named, and no more than those."""
        pool = self._pools[rows[0]["place"], rows[0]["tier"]]
        gone = {row["first_block"] for row in rows}
        assert gone <= pool.keys(), f"not there: {rows}"
        for key, parent in pool.items():
            if parent in gone:
                gone.add(key)
        assert len(gone) == sum(row["blocks"] for row in rows), f"something continues it: {rows}"
        for key in gone:
            del pool[key]

    def prefill_step(self, row: Row) -> None:
        for chain, at in self._of(row):
            self._pages[row["request_id"], f"node-{row['place']}"].update(chain[at : at + row["blocks"]])

    def transfer(self, row: Row) -> None:
        first, request_id = row["first_block"], row["request_id"]
        (source, target), (before, after) = row["place"].split(">"), row["tier"].split(">")
        prompt = self._prompts.get(request_id, ())
        if before == "hbm" and first in prompt:
            assert first in self._pages[request_id, source], f"neither computed nor loaded there: {row}"
        if (before, after) in (("dram", "dram"), ("dram", "ssd")):
            assert first in self._pools[source, before] or not first, f"not there: {row}"
        if (before, after) == ("dram", "hbm") and first:
            at = prompt.index(first)
            self._pages[request_id, target].update(prompt[at : at + row["blocks"]])

    def release(self, row: Row) -> None:
        self._pages.pop((row["request_id"], row["place"]), None)

    def death(self, row: Row) -> None:
        for tier in TIERS[:2]:
            self._pools.pop((f"node-{row['place']}", tier), None)
