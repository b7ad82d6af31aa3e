"""How every picture looks: colours told apart by every kind of colour vision, and lines that need no colour."""

from __future__ import annotations

# Okabe and Ito's palette.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#777777"
LINE_STYLES = ("-", "--", ":", "-.")
