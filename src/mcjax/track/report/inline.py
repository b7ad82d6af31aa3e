"""A figure inside a page: SVG that follows the page's colours, or a PNG where that would be too large."""

from __future__ import annotations

import base64
import html
import re

from mcjax.track.plots.drawn import Drawn
from mcjax.track.plots.style import INK

LARGEST_SVG_BYTES = 300_000
PNG_DPI = 220


def inline(drawn: Drawn, name: str) -> str:
    """HTML of the picture; `name` keeps its ids apart from those of other pictures on the page."""
    svg = _for_page(drawn.svg(transparent=True), name, drawn.title)
    if len(svg.encode()) <= LARGEST_SVG_BYTES:
        return svg
    picture = base64.b64encode(drawn.png(PNG_DPI)).decode()
    width_px, height_px = (round(96 * side) for side in drawn.figure.get_size_inches())
    title = html.escape(drawn.title, quote=True)
    return (
        f'<img class="drawn paper" alt="{title}" width="{width_px}" height="{height_px}" '
        f'src="data:image/png;base64,{picture}">'
    )


def _for_page(svg: str, name: str, title: str) -> str:
    svg = svg[svg.index("<svg") :]
    # Style that would hold for the whole page, what no reader sees, and labels a second time.
    svg = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = svg.replace(INK, "currentColor").replace(INK.lower(), "currentColor")
    width, height = re.findall(r'\b(?:width|height)="([\d.]+)pt"', svg[: svg.index(">")])
    head = re.sub(r'\b(?:width|height)="[\d.]+pt"\s*', "", svg[: svg.index(">")])
    label = f'class="drawn" role="img" aria-label="{html.escape(title, quote=True)}" '
    size = f'width="{float(width) * 4 / 3:.0f}" height="{float(height) * 4 / 3:.0f}"'
    return re.sub(r"\n\s*", "\n", f"{head.replace('<svg', f'<svg {label}', 1)} {size}{svg[svg.index('>') :]}").strip()
