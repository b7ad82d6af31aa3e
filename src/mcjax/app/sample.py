"""A look at what a workload will ask for, before it does."""

from __future__ import annotations

from mcjax.types import Tokens
from mcjax.workload.base import Workload

SAMPLED_PROMPTS = 256


def uncached_tokens(workload: Workload, block_tokens: int, most: int = SAMPLED_PROMPTS) -> list[int]:
    """Tokens that the first prompts of a workload need computed if nothing was ever evicted, two numbers a prompt: with
    what earlier prompts computed at hand, and also with what was decoded before in the same session.

    Sessions are played by their scripts, one after the other. The last token of a prompt is computed in any case.
    """
    prefixes = _Prefixes(block_tokens)
    found: list[int] = []
    for session in workload.sessions():
        decoded = 0
        while len(found) < 2 * most and (turn := session.next_turn(None)) is not None:
            prompt = turn.request.tokens
            if prompt is None:
                continue
            cached = prefixes.add(prompt)
            with_decoded = max(cached, decoded // block_tokens * block_tokens)
            found += [max(1, len(prompt) - cached), max(1, len(prompt) - with_decoded)]
            decoded = len(prompt) + turn.script.output_tokens
        if len(found) >= 2 * most:
            break
    return found


class _Prefixes:
    """Every full block of the prompts so far, by the block before it and its tokens."""

    def __init__(self, block_tokens: int):
        self._block_tokens = block_tokens
        self._blocks: dict[tuple[int, bytes], int] = {}

    def add(self, prompt: Tokens) -> int:
        """Take a prompt in; how many tokens of it were there."""
        parent, known, cached = 0, True, 0
        for start in range(0, len(prompt) - self._block_tokens + 1, self._block_tokens):
            key = (parent, prompt[start : start + self._block_tokens].tobytes())
            known = known and key in self._blocks
            cached += self._block_tokens if known else 0
            parent = self._blocks.setdefault(key, len(self._blocks) + 1)
        return cached
