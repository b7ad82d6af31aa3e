"""How every picture looks: colours told apart by every kind of colour vision, and lines that need no colour."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

# Okabe and Ito's palette; its yellow is too pale for a line on white paper, and its black is our ink.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#777777"
SKY, AMBER, BROWN, INK = "#56B4E9", "#E69F00", "#7A4A1E", "#222222"
LINE_STYLES = ("-", "--", ":", "-.")

COLUMN_IN, PAGE_IN = 3.33, 7.0
"""Widths of a column, and of the text, of a page with two columns (ACM's and USENIX's), in inches."""
WIDTHS = {"column": COLUMN_IN, "page": PAGE_IN}
TEXT_PT, SMALL_PT = 8.0, 7.0


@dataclass(frozen=True, slots=True)
class Look:
    """How one group is drawn: no two share a colour, a line style or a marker, so grey paper tells them apart too."""

    colour: str
    line: Any
    marker: str
    hatch: str


LOOKS = (
    Look(BLUE, "-", "o", ""),
    Look(ORANGE, "--", "s", "///"),
    Look(GREEN, "-.", "^", "..."),
    Look(PURPLE, ":", "D", "xxx"),
    Look(SKY, (0, (6, 1)), "v", "\\\\\\"),
    Look(AMBER, (0, (3, 1, 1, 1)), "P", "+++"),
    Look(BROWN, (0, (1, 1)), "X", "ooo"),
    Look(INK, (0, (6, 1, 1, 1, 1, 1)), "*", "---"),
)

_PARAMETERS: Any = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib: a picture is the same on every machine
    "font.size": TEXT_PT,
    "axes.titlesize": TEXT_PT,
    "axes.titlelocation": "left",
    "axes.titlepad": 3.0,
    "axes.labelsize": TEXT_PT,
    "axes.labelpad": 2.0,
    "xtick.labelsize": SMALL_PT,
    "ytick.labelsize": SMALL_PT,
    "legend.fontsize": SMALL_PT,
    "legend.title_fontsize": SMALL_PT,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "legend.columnspacing": 1.2,
    "legend.labelspacing": 0.25,
    "legend.borderpad": 0.1,
    "figure.titlesize": TEXT_PT,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
    "hatch.linewidth": 0.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.4,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.usetex": False,
    "text.parse_math": False,  # labels are text of the user's: a `$` in one is a dollar
    "pdf.fonttype": 42,  # fonts are embedded as TrueType; publishers refuse Type 3
    "ps.fonttype": 42,
    "svg.fonttype": "path",  # looks the same where the font is not installed
    "svg.hashsalt": "mcjax",  # equal pictures, equal files
    "figure.constrained_layout.h_pad": 0.03,
    "figure.constrained_layout.w_pad": 0.03,
}


@contextlib.contextmanager
def styled() -> Generator[None]:
    """Our style, within this context only; the settings of matplotlib's user stay as they are."""
    import matplotlib

    library: Any = matplotlib
    with library.rc_context(_PARAMETERS):
        yield


def new_figure(width_in: float, height_in: float) -> Any:
    """A `matplotlib.figure.Figure` that no window and no global list knows of."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(width_in, height_in), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
