"""Writes `golden/*.npz`: logits that transformers gives for each small config, which tests without torch look at.

Needs the extra `parity`. Numbers of weights and tokens follow from names, so a file holds logits only:
`python tests/models/make_golden.py`, with `tests` and `tests/models` on PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from seeded_checkpoint import GOLDEN_ROWS, golden_file, tokens_of

from family_cases import CONFIGS


def main() -> None:
    from transformers_side import transformers_logits, transformers_model

    for case in CONFIGS:
        model = transformers_model(case)
        tokens = tokens_of(case)
        logits: dict[str, Any] = {
            f"row{row}": transformers_logits(model, tokens[row])[np.array(GOLDEN_ROWS[row].positions)]
            for row in range(len(GOLDEN_ROWS))
        }
        file = golden_file(case)
        Path(file.parent).mkdir(exist_ok=True)
        np.savez(file, **logits)
        print(file.name, file.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
