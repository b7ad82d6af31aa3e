"""`mcjax train-tiny [DIR]`: train the built-in model and its draft again, from text that ships with Python.

Writes DIR/tiny and DIR/tiny-draft, as Hugging Face model directories: `mcjax model=tiny model.checkpoint=DIR/tiny`.
--measure trains nothing: it says how well the models that ship with mcjax know text that they have not seen.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcjax.errors import UserError

if TYPE_CHECKING:
    from mcjax.models.training.loop import Progress
    from mcjax.models.training.text import Corpus


def command(arguments: Sequence[str]) -> int:
    """`mcjax train-tiny`; exit status 0 when both models are written, 2 when they cannot be trained as asked."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("mcjax train-tiny", description=__doc__, formatter_class=form)
    parser.add_argument("directory", nargs="?", default="tiny-models", help="where the models go (tiny-models)")
    parser.add_argument("--steps", type=int, help="of each model; by default what the shipped ones had")
    parser.add_argument("--minutes", type=float, help="stop after so many, all steps done or not; --resume goes on")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the order of the text")
    parser.add_argument("--resume", action="store_true", help="go on from the states that lie in the directory")
    parser.add_argument("--measure", action="store_true", help="measure the models that ship with mcjax")
    options = parser.parse_args(arguments)
    from mcjax.models.training.text import corpus  # here, so that --help is quick

    text = corpus()
    print(f"text: {text.training.size:,} tokens, and {text.held_out_bytes:,} bytes held out; sha256 {text.digest[:16]}")
    _tell_differences(text)
    if options.measure:
        return _measure(text)
    from mcjax.models.training.tiny import checked, train_both

    try:
        checked(options.steps, options.minutes)
        folder, minutes = Path(options.directory), options.minutes or math.inf
        cards = train_both(folder, text, _tell, options.steps, options.seed, minutes, options.resume)
    except UserError as problem:
        print(f"mcjax: {problem}", file=sys.stderr)
        return 2
    except OSError as problem:
        print(f"mcjax: {options.directory} cannot be written: {problem}", file=sys.stderr)
        return 2
    for name, card in cards.items():
        words = f"{folder / name}: {card['held_out']['bits_per_byte']:.3f} bits per byte after {card['steps']} steps"
        print(f"{words} of {card['recipe']['steps']}")
    return 0


def _tell(progress: Progress) -> None:
    left = f"{progress.left_s / 60:.0f} min" if progress.left_s >= 60 else f"{progress.left_s:.0f} s"
    words = f"{progress.name}: step {progress.step}/{progress.steps}, {progress.loss_bits:.3f} bits a token"
    print(f"{words}, {left} left", flush=True)


def _tell_differences(text: Corpus) -> None:
    from mcjax.models.training.shipped import card

    known: dict[str, Any] = card("tiny")["text"]
    if text.digest == known["digest"]:
        print("the text is what the shipped models learnt")
        return
    differing = text.differences(known["parts"])
    shown = ", ".join(differing[:5]) + (", ..." if len(differing) > 5 else "")
    print(
        f"the shipped models learnt {known['origin']}: of {len(known['parts'])} files {len(differing)} differ ({shown})"
    )


def _measure(text: Corpus) -> int:
    from mcjax.models.training.tiny import shipped

    results, both = shipped(text)
    print(f"{'':<12}{'bits per byte':>14}{'token right':>13}{'median margin':>15}{'margin < 0.01':>15}")
    for name, each in results.items():
        print(
            f"{name:<12}{each.bits_per_byte:>14.3f}{each.right:>13.1%}{each.median_margin:>15.3f}{each.narrow:>15.2%}"
        )
    print(f"tiny-draft finds the same token likeliest as tiny: {both.same:.1%}; sampling accepts {both.accepted:.1%}")
    return 0
