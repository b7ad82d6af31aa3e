"""A small stock of English phrases, and sentences composed from it by a generator. All text is ASCII."""

from __future__ import annotations

import numpy as np

Grammar = tuple[tuple[str, ...], ...]
"""One tuple of choices for each place in a sentence; the places are joined by spaces."""

INSTRUCTIONS: Grammar = (
    ("Always", "When in doubt,", "Above all,", "In every reply,", "Before you answer,"),
    ("be brief and exact about", "name the source of", "show the steps behind", "say plainly how sure you are of"),
    ("each figure you give,", "every date and place,", "any claim about cost,", "the advice you offer,"),
    ("and ask when a detail is missing.", "and keep the tone friendly.", "and avoid jargon where you can."),
)

STATEMENTS: Grammar = (
    ("The night crew", "Our harbour office", "The new engineer", "An inspector", "The valley farm", "The library"),
    ("counted", "repaired", "ordered", "measured", "moved", "sold", "painted", "inspected"),
    ("forty wooden crates", "the old water pumps", "six rolls of cable", "the eastern bridge", "two small boats"),
    ("before the rain began.", "under budget.", "for the spring fair.", "at half the usual price.", "in one long day."),
)

QUESTIONS: Grammar = (
    ("Could you explain", "Please tell me", "I would like to know", "Can you work out", "Help me understand"),
    ("why the schedule slipped", "how much we would save", "who should sign the form", "what the report leaves out"),
    ("if the delivery comes late?", "once the repairs are done?", "when the two teams meet?", "under the new rules?"),
)

ANSWERS: Grammar = (
    ("In short,", "As far as I can see,", "From the figures above,", "On balance,", "To be precise,"),
    ("the second plan costs less", "the crew needs one more day", "the pumps should be checked", "nothing was lost"),
    ("because the parts arrived early.", "unless the weather turns.", "as the clerk noted.", "so you may go ahead."),
)


def sentence(rng: np.random.Generator, grammar: Grammar) -> str:
    """One sentence: a choice for each place."""
    return " ".join(choices[int(rng.integers(len(choices)))] for choices in grammar)
