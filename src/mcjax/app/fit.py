"""`mcjax fit MEASUREMENTS [OUT.yaml]`: the constants of a `cost=fitted` from measured steps, with their errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from mcjax.cost import measurements
from mcjax.cost.fit import fit_chunks, fit_decode
from mcjax.cost.fitted import Fitted
from mcjax.cost.measurements import Measurement
from mcjax.cost.regimes import RegimeError, errors_by_regime, predicted_s
from mcjax.errors import ConfigError, UserError

CONSTANTS = {
    "prefill_ps_per_token": "a of prefill T(n) = a n + b n^2, picoseconds",
    "prefill_fs_per_token_squared": "b, femtoseconds",
    "decode_base_ns": "a decode step's fixed part",
    "decode_ns_per_sequence": "each sequence in the batch",
    "decode_ps_per_context_token": "each cached token of the batch, picoseconds",
}


def fit(rows: Sequence[Measurement], name: str = "fitted", hardware: str = "", model: str = "") -> Fitted:
    """Least squares of relative errors over the `prefill` and the `decode` rows; `mixed` rows are left for checking.

    Raises `ConfigError` when the rows cannot tell the constants apart.
    """
    chunks = [row for row in rows if row.kind == "prefill"]
    steps = [row for row in rows if row.kind == "decode"]
    if len({row.start_tokens + row.length_tokens for row in chunks}) < 2:
        raise ConfigError("measurements", "prefill", "two rows with different ends (start + length) are needed")
    if len({row.context_tokens / row.batch for row in steps}) < 2:
        raise ConfigError("measurements", "decode", "two rows with different contexts a sequence are needed")
    linear, square = fit_chunks(
        [row.start_tokens for row in chunks],
        [row.length_tokens for row in chunks],
        [row.seconds for row in chunks],
    )
    base, per_sequence, per_token = fit_decode(
        [row.batch for row in steps],
        [row.context_tokens for row in steps],
        [row.seconds for row in steps],
    )
    return Fitted(name, linear, square, base, per_sequence, per_token, hardware, model)


def table(errors: Sequence[RegimeError]) -> list[str]:
    """Lines of text: regime, rows, mean and largest error."""
    width = max(len(error.regime) for error in errors)
    lines = [f"{'relative error':<{width}}   rows     mean  largest"]
    return lines + [
        f"{error.regime:<{width}} {error.rows:>6} {error.mean:>7.1%} {error.largest:>8.1%}" for error in errors
    ]


def as_yaml(cost: Fitted, rows: Sequence[Measurement], path: Path) -> str:
    """A file of the `cost` group, which says what it was made from and how well it holds."""
    counts = ", ".join(f"{sum(row.kind == kind for row in rows)} {kind}" for kind in measurements.KINDS)
    comment = [
        f"Fitted by `mcjax fit` to {path.name} ({counts} rows; SHA-256 {sha256(path.read_bytes()).hexdigest()[:16]}).",
        "Least squares of relative errors over the prefill and the decode rows; mixed rows were not fitted to.",
        *table(errors_by_regime(cost, rows)),
    ]
    values = {key: (getattr(cost, key), words) for key, words in CONSTANTS.items()}
    lines = [*(f"# {line}" for line in comment), "_target_: mcjax.cost.fitted.Fitted"]
    lines.append(f"name: {_quoted(cost.name)}  # how messages call it")
    lines += [f"{key}: {value}  # {words}" for key, (value, words) in values.items()]
    lines.append(f"fitted_hardware: {_quoted(cost.fitted_hardware)}  # refused on other hardware; empty: not checked")
    lines.append(f"fitted_model: {_quoted(cost.fitted_model)}  # and for other models; empty: not checked")
    lines.append("allow_mismatch: false  # true: use the constants anyway")
    return "\n".join(lines) + "\n"


def plot(cost: Fitted, rows: Sequence[Measurement]) -> Any:
    """A `matplotlib.figure.Figure`: measured against fitted for prefill and decode, and the errors of all rows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from mcjax.track.plots.style import BLUE, GREY, ORANGE

    figure: Any = Figure(figsize=(13, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    prefill, decode, error = figure.subplots(1, 3)
    _against(prefill, cost, [row for row in rows if row.kind == "prefill"], "Prefill", "start_tokens", "length_tokens")
    _against(decode, cost, [row for row in rows if row.kind == "decode"], "Decode step", "batch", "context_tokens")
    for kind, color in zip(measurements.KINDS, (BLUE, ORANGE, GREY), strict=True):
        own = [row for row in rows if row.kind == kind]
        if own:
            percent = [100 * (predicted_s(cost, row) / row.seconds - 1) for row in own]
            label = f"{kind} (not fitted to)" if kind == "mixed" else kind
            error.scatter([row.seconds for row in own], percent, s=14, color=color, label=label)
    error.axhline(0, color=GREY, linewidth=1)
    error.set_xscale("log")
    error.set_xlabel("measured, s")
    error.set_ylabel("fitted over measured, %")
    error.set_title("Error", loc="left", fontsize=10, fontweight="bold")
    error.legend(frameon=False, fontsize=8)
    for panel in (prefill, decode, error):
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _against(panel: Any, cost: Fitted, rows: list[Measurement], title: str, family: str, across: str) -> None:
    """Measured points and the fitted line through them, for up to six values of `family`."""
    values = sorted({getattr(row, family) for row in rows})
    chosen = np.unique(np.linspace(0, len(values) - 1, min(len(values), 6)).round().astype(np.int64))
    shown = [values[index] for index in chosen.tolist()]
    for index, value in enumerate(shown):
        own = sorted((row for row in rows if getattr(row, family) == value), key=lambda row: getattr(row, across))
        color = f"C{index}"
        places = [getattr(row, across) for row in own]
        panel.scatter(places, [row.seconds for row in own], s=16, color=color, label=f"{family} {value}")
        panel.plot(places, [predicted_s(cost, row) for row in own], color=color, linewidth=1.2)
    smallest = min((getattr(row, across) for row in rows if getattr(row, across)), default=1)
    panel.set_xscale("symlog", linthresh=smallest)  # a context may be 0
    panel.set_yscale("log")
    panel.set_xlabel(across.replace("_", " "))
    panel.set_ylabel("seconds (dots measured, lines fitted)")
    panel.set_title(title, loc="left", fontsize=10, fontweight="bold")
    panel.legend(frameon=False, fontsize=8)


def _quoted(text: str) -> str:
    """As a YAML string in any case."""
    return "'" + text.replace("'", "''") + "'"


def command(arguments: Sequence[str]) -> int:
    """`mcjax fit`; exit status 0 when the file is written, 2 when the measurements cannot be used."""
    parser = argparse.ArgumentParser("mcjax fit", description=__doc__)
    parser.add_argument("measurements", help="a .csv or .parquet file of steps; docs/cost-models.md has its columns")
    parser.add_argument("out", nargs="?", help="the YAML to write; by default beside the measurements")
    parser.add_argument("--name", default="fitted", help="how messages call the cost model")
    parser.add_argument("--hardware", default="", help="the hardware measured, as hardware= calls it")
    parser.add_argument("--model", default="", help="the model measured, as model= calls it")
    parser.add_argument("--force", action="store_true", help="overwrite files that are there")
    options = parser.parse_args(arguments)
    source = Path(options.measurements)
    out = Path(options.out) if options.out else source.with_suffix(".yaml")
    picture = out.with_suffix(".png")
    try:
        rows = measurements.read(str(source))
        cost = fit(rows, options.name, options.hardware, options.model)
        if out.suffix not in (".yaml", ".yml"):
            raise ConfigError("out", out, "must end in .yaml")
        for file in (out, picture):
            if file.exists() and not options.force:
                raise ConfigError("out", file, "is there already; --force overwrites it")
        text, figure = as_yaml(cost, rows, source), plot(cost, rows)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text, encoding="utf-8")
            figure.savefig(picture)
        except OSError as problem:
            raise ConfigError("out", out, f"cannot be written ({problem.strerror})") from None
    except UserError as problem:
        print(f"mcjax: {problem}", file=sys.stderr)
        return 2
    print("\n".join(table(errors_by_regime(cost, rows))))
    print(f"{out} and {picture} are written")
    if out.parent.name == "cost":
        print(f"use them: mcjax --config-dir {out.parent.parent} cost={out.stem} ...")
    return 0
