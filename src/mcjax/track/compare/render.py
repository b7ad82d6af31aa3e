"""A comparison as text of a format: for a terminal, a README, a spreadsheet, a paper."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Callable, Mapping, Sequence

from mcjax.errors import ConfigError
from mcjax.track.compare.comparison import Comparison
from mcjax.track.compare.terminal import plain
from mcjax.track.compare.view import BEST, Grid, grids, legend, sentences

FORMATS = ("table", "md", "csv", "latex")
_ESCAPED = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}


def render(comparison: Comparison, format: str, width: int = 100) -> str:
    """The comparison as text that ends with a newline. Raises `ConfigError` for an unknown format."""
    writers: Mapping[str, Callable[[], str]] = {
        "table": lambda: plain(comparison, width),
        "md": lambda: _markdown(comparison),
        "csv": lambda: _csv(comparison),
        "latex": lambda: _latex(comparison),
    }
    if format not in writers:
        raise ConfigError("format", format, "no such format", FORMATS)
    return writers[format]()


def html_of(comparison: Comparison) -> str:
    """For notebooks and reports: tables, and what limits them."""
    told = legend(comparison)
    found = [_html_table(grid) for grid in ([told] if told else []) + list(grids(comparison))]
    found += [f"<p><small>{html.escape(line)}</small></p>" for line in sentences(comparison)]
    return "\n".join(found)


def _html_table(grid: Grid) -> str:
    def cell(text: str, name: str = "td", strong: bool = False) -> str:
        lines = "<br>".join(html.escape(line) for line in text.split("\n"))
        return f"<{name} style='text-align:left'>{f'<b>{lines}</b>' if strong else lines}</{name}>"

    head = "".join(cell(name, "th") for name in grid.header)
    rows = [
        "".join(cell(text, strong=(index, at) in grid.best) for at, text in enumerate(row))
        for index, row in enumerate(grid.rows)
    ]
    title = f"<p><b>{html.escape(grid.title)}</b></p>" if grid.title else ""
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"{title}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _markdown(comparison: Comparison) -> str:
    def cell(text: str, strong: bool = False) -> str:
        for sign in ("\\", "|", "*", "_", "<"):
            text = text.replace(sign, f"\\{sign}")
        text = text.replace("\n", "<br>")
        return f"**{text}**" if strong else text

    def table(grid: Grid) -> list[str]:
        lines = [f"**{cell(grid.title)}**", ""] if grid.title else []
        lines.append(f"| {' | '.join(cell(name) for name in grid.header)} |")
        lines.append(f"|{'|'.join(['---', *(['---:'] * (len(grid.header) - 1))])}|")
        for index, row in enumerate(grid.rows):
            lines.append(f"| {' | '.join(cell(text, (index, at) in grid.best) for at, text in enumerate(row))} |")
        return [*lines, ""]

    told = legend(comparison)
    lines = [line for grid in ([told] if told else []) + list(grids(comparison)) for line in table(grid)]
    lines += [f"- {cell(line)}" for line in sentences(comparison)]
    return "\n".join(lines).rstrip() + "\n"


def _csv(comparison: Comparison) -> str:
    output = io.StringIO()
    records = comparison.records()
    writer = csv.DictWriter(output, list(records[0]) if records else ["group"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({**record, "best": str(record["best"]).lower()} for record in records)
    return output.getvalue()


def _latex(comparison: Comparison) -> str:
    """`tabular`s with the rules of the package booktabs; notes as comments."""
    told = legend(comparison)
    lines = ["% needs \\usepackage{booktabs}"]
    lines += [f"% {line}" for line in sentences(comparison)]
    for grid in ([told] if told else []) + list(grids(comparison)):
        lines += _tabular(grid)
    return "\n".join(lines) + "\n"


def _tabular(grid: Grid) -> list[str]:
    lines = [f"% {grid.title}"] if grid.title else []
    lines += [f"\\begin{{tabular}}{{l{'r' * (len(grid.header) - 1)}}}", "\\toprule"]
    lines.append(_latex_row([escaped(name) for name in grid.header]))
    lines.append("\\midrule")
    for index, row in enumerate(grid.rows):
        parts = [text.split("\n") for text in row]
        first = [escaped(part[0]) for part in parts]
        marked = [
            f"\\textbf{{{text.removesuffix(BEST).strip()}}}$^{{*}}$" if (index, at) in grid.best else text
            for at, text in enumerate(first)
        ]
        lines.append(_latex_row(marked))
        if any(len(part) > 1 for part in parts):
            below = [f"{{\\footnotesize {escaped(part[1])}}}" if len(part) > 1 else "" for part in parts]
            lines.append(_latex_row(below))
    return [*lines, "\\bottomrule", "\\end{tabular}"]


def _latex_row(cells: Sequence[str]) -> str:
    # A row that begins with a bracket would be read as the length of the line break before it.
    return " & ".join(f"{{}}{cell}" if cell.startswith("[") else cell for cell in cells) + r" \\"


def escaped(text: str) -> str:
    """Text that LaTeX prints as it stands."""
    return "".join(_ESCAPED.get(sign, sign) for sign in text)
