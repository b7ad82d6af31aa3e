"""What encodings at rest cost in accuracy: `python benchmarks/kvpool_encodings.py`; docs/benchmarks-kvpool.md.

Each prompt's full blocks are encoded and decoded as a tier would, and the prompt's end is computed again behind them: a
hit. Twice: fed with what the exact blocks lead to (so that logits can be compared token by token), and freely.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measure import machine, say
from numpy.typing import NDArray
from simulator import positive
from tables import table

from mcjax.backends.jax.packers import compiled_packer
from mcjax.backends.jax.programs import HEADER, Geometry, Programs, pack_row
from mcjax.cost.catalogue import model as shape_of
from mcjax.kvpool.encodings.base import BlockLayout
from mcjax.kvpool.encodings.named import MAKERS
from mcjax.models import catalogue
from mcjax.models.tokenizer import tokenizer_for
from mcjax.types import Packer, Tokens
from mcjax.workload.chat import Chat
from mcjax.workload.text import Text

PROMPTS, STEPS, BATCH, PAGE_TOKENS, CHUNK_TOKENS, CONTEXT_TOKENS = 50, 32, 10, 16, 128, 512
TENANTS = {"helpdesk": {"share": 1.0, "system_prompt_tokens": 60}}

Logits = NDArray[np.float32]


@dataclasses.dataclass
class Compared:
    """Sums over all prompts and positions."""

    positions: int = 0
    agreeing: int = 0
    squared_error: float = 0.0
    squared_logits: float = 0.0
    largest_error: float = 0.0
    error_sum: float = 0.0
    prompts: int = 0
    same_answers: int = 0
    same_tokens: int = 0
    margins: list[float] = dataclasses.field(default_factory=list[float])
    """By how much the exact logits prefer the exact choice where another was made."""

    def add(self, exact: Logits, other: Logits) -> None:
        """`[V]` logits of one position, fed with the same tokens."""
        error = np.abs(other - exact)
        self.positions += 1
        self.squared_error += float(np.square(error).mean())
        self.squared_logits += float(np.square(exact - exact.mean()).mean())
        self.largest_error = max(self.largest_error, float(error.max()))
        self.error_sum += float(error.mean())
        choice = int(other.argmax())
        if choice == int(exact.argmax()):
            self.agreeing += 1
        else:
            self.margins.append(float(exact.max() - exact[choice]))

    def values(self) -> dict[str, Any]:
        return {
            "positions": self.positions,
            "relative_rms_error": (self.squared_error / self.squared_logits) ** 0.5,
            "mean_error": self.error_sum / self.positions,
            "largest_error": self.largest_error,
            "greedy_agreement": self.agreeing / self.positions,
            "largest_margin": max(self.margins, default=0.0),
            "prompts": self.prompts,
            "same_answers": self.same_answers,
            "same_tokens": self.same_tokens / (self.prompts * (self.positions // self.prompts)),
        }


class Reader:
    """A model's steps for a batch of prompts, each with pages of its own."""

    def __init__(self, name: str):
        import jax

        shape = shape_of(name)
        loaded = catalogue.load(shape, 0, CONTEXT_TOKENS)
        wide = -(-CONTEXT_TOKENS // PAGE_TOKENS)
        self.geometry = Geometry(BATCH * wide, PAGE_TOKENS, BATCH, CHUNK_TOKENS, CONTEXT_TOKENS, move_pages=wide)
        self._programs = Programs(loaded.model, self.geometry)
        self._device = self._programs.on(jax.local_devices()[0])
        dtype: Any = "float32" if shape.dtype_bytes == 4 else "bfloat16"
        rows = shape.layers * shape.cache_entries * shape.cache_heads
        self.layout = BlockLayout(dtype, PAGE_TOKENS, rows, shape.cache_dim)
        self._pages: Any = None

    def prompts(self, prompts: Sequence[Tokens]) -> list[NDArray[np.uint8]]:
        """Compute them; of each its full blocks: `[n, block_bytes]`."""
        self._pages = self._device.new_pages()
        for slot, prompt in enumerate(prompts):
            for start in range(0, len(prompt), CHUNK_TOKENS):
                chunk = prompt[start : start + CHUNK_TOKENS]
                row = pack_row(CHUNK_TOKENS, len(chunk), start, chunk, self._table(slot), self.geometry)
                self._step(row[None], CHUNK_TOKENS)
        return [self._read(slot, len(prompt) // PAGE_TOKENS) for slot, prompt in enumerate(prompts)]

    def replaced(self, blocks: Sequence[NDArray[np.uint8]]) -> None:
        """The prompts' first pages hold these blocks from now on."""
        for slot, mine in enumerate(blocks):
            staged = np.zeros((self.geometry.move_pages, *self._programs.block_shape), self._programs.block_dtype)
            staged.reshape(len(staged), -1).view(np.uint8)[: len(mine)] = mine
            self._pages = self._device.scatter(self._pages, self._slots(slot, len(mine)), staged)

    def answers(self, prompts: Sequence[Tokens], fed: Sequence[Sequence[int]] | None, steps: int) -> list[list[Logits]]:
        """Logits of `steps` tokens behind each prompt, whose last token is computed again. The next token is that of
        `fed`, or the likeliest."""
        logits: list[list[Logits]] = [[] for _ in prompts]
        tokens = [int(prompt[-1]) for prompt in prompts]
        for step in range(steps):
            rows = np.zeros((BATCH, HEADER + 1 + self.geometry.table_width), np.int32)
            rows[:, HEADER + 1 :] = self.geometry.pages
            for slot, prompt in enumerate(prompts):
                token = np.array([tokens[slot]], np.int32)
                rows[slot] = pack_row(1, 1, len(prompt) - 1 + step, token, self._table(slot), self.geometry)
            found = self._step(rows, 1)
            for slot in range(len(prompts)):
                logits[slot].append(found[slot].copy())
                tokens[slot] = int(found[slot].argmax()) if fed is None else fed[slot][step]
        return logits

    def _step(self, rows: NDArray[np.int32], width: int) -> Logits:
        logits, self._pages = self._device.model(len(rows), width)(self._device.weights, self._pages, rows)
        return np.asarray(logits, np.float32)

    def _table(self, slot: int) -> list[int]:
        wide = self.geometry.table_width
        return list(range(slot * wide, (slot + 1) * wide))

    def _slots(self, slot: int, count: int) -> NDArray[np.int32]:
        slots = np.full(self.geometry.move_pages, self.geometry.pages, np.int32)
        slots[:count] = self._table(slot)[:count]
        return slots

    def _read(self, slot: int, count: int) -> NDArray[np.uint8]:
        taken = np.asarray(self._device.gather(self._pages, self._slots(slot, count)))
        return taken[:count].view(np.uint8).reshape(count, self.layout.block_bytes).copy()


def measured(name: str, prompts: Sequence[Tokens], steps: int, encodings: Sequence[str]) -> dict[str, Any]:
    """Every encoding against blocks as they were computed."""
    reader = Reader(name)
    packers = {encoding: compiled_packer(encoding, reader.layout, "encoding") for encoding in encodings}
    found = {encoding: Compared() for encoding in encodings}
    blocks = 0
    for first in range(0, len(prompts), BATCH):
        some = prompts[first : first + BATCH]
        say(f"{name}: prompts {first + 1} to {first + len(some)} of {len(prompts)}")
        exact_blocks = reader.prompts(some)
        blocks += sum(map(len, exact_blocks))
        exact = reader.answers(some, None, steps)
        chosen = [[int(logits.argmax()) for logits in mine] for mine in exact]
        for encoding, packer in packers.items():
            rested = [through(packer, mine) for mine in exact_blocks]
            reader.replaced(rested)
            forced = reader.answers(some, chosen, steps)
            reader.replaced(rested)  # a decode step may have written into the last of them
            free = reader.answers(some, None, steps)
            _compare(found[encoding], exact, forced, free, chosen)
    return {
        "model": name,
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)) / len(prompts),
        "blocks": blocks,
        "steps": steps,
        "encodings": {
            encoding: {"bytes_share": packers[encoding].packed_bytes / packers[encoding].block_bytes, **one.values()}
            for encoding, one in found.items()
        },
    }


def through(packer: Packer, blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`[n, block_bytes]` blocks as they come back from a tier."""
    return np.stack([packer.unpack(packer.pack(block)) for block in blocks]) if len(blocks) else blocks


def _compare(
    into: Compared,
    exact: Sequence[Sequence[Logits]],
    forced: Sequence[Sequence[Logits]],
    free: Sequence[Sequence[Logits]],
    chosen: Sequence[Sequence[int]],
) -> None:
    for right, fed, own, tokens in zip(exact, forced, free, chosen, strict=True):
        for first, second in zip(right, fed, strict=True):
            into.add(first, second)
        said = [int(logits.argmax()) for logits in own]
        into.prompts += 1
        into.same_answers += said == tokens
        into.same_tokens += sum(one == other for one, other in zip(said, tokens, strict=True))


def prompts_for(name: str, count: int) -> list[Tokens]:
    """The questions that mcjax ships, then composed conversations of the chat workload; the model's own tokenizer."""
    shape = shape_of(name)
    tokenizer = tokenizer_for(shape)
    composed = Chat(0, count, 1, TENANTS, (60, 200), (30, 60), (1, 1), 400, tokenizer=tokenizer)
    asked = Text(0, tokenizer=tokenizer).sessions() if shape.checkpoint else iter(())
    found: list[Tokens] = []
    for session in [*asked, *composed.sessions()]:
        turn = session.next_turn(None)
        if turn is not None and turn.request.tokens is not None:
            found.append(turn.request.tokens)
    return found[:count]


def tables(results: dict[str, Any]) -> str:
    alike = f"same {results['steps']} tokens"
    head = ("encoding", "bytes", "relative error", "mean", "largest", "same choice", alike, "tokens")
    rows = [
        (
            f"`{name}`",
            f"{one['bytes_share']:.0%}",
            f"{one['relative_rms_error']:.2%}",
            f"{one['mean_error']:.3f}",
            f"{one['largest_error']:.2f}",
            f"{one['greedy_agreement']:.2%}",
            f"{one['same_answers']} of {one['prompts']}",
            f"{one['same_tokens']:.1%}",
        )
        for name, one in results["encodings"].items()
    ]
    about = (
        f"{results['model']}, {results['prompts']} prompts of {results['prompt_tokens']:.0f} tokens on average, "
        f"{results['blocks']:,} blocks of {PAGE_TOKENS} tokens, {results['steps']} output tokens each"
    )
    return f"`{results['command']}`\n\n{about}.\n\n{table(head, rows)}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvpool_encodings.py", description="What encodings at rest cost in accuracy.")
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2")
    parser.add_argument("--prompts", type=positive, default=PROMPTS)
    parser.add_argument("--steps", type=positive, default=STEPS, help="output tokens of each prompt")
    parser.add_argument("--encodings", nargs="+", choices=sorted(MAKERS), default=["int8", "fp8"])
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder of the results")
    options = parser.parse_args(arguments)
    found = measured(options.model, prompts_for(options.model, options.prompts), options.steps, options.encodings)
    command = shlex.join(["python", "benchmarks/kvpool_encodings.py", *arguments])
    results = {"command": command, "machine": machine(), **found}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "encodings.json").write_text(json.dumps(results, indent=1) + "\n")
    print(tables(results), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
