"""`python notebooks/render.py [NAME ...]`: run notebooks, and keep what they show as Markdown in `docs/notebooks`.

The notebooks themselves are stored without outputs; this is for reading them without running them. Pictures go to
`docs/images/notebooks`. Needs the extra `notebooks`, and the public traces in `$MCJAX_TRACES`.
"""

from __future__ import annotations

import argparse
import base64
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
PAGES = ROOT / "docs" / "notebooks"
PICTURES = ROOT / "docs" / "images" / "notebooks"
TIMEOUT_S = 600
COLOURS = 128


def executed(path: Path, folder: Path, timeout_s: float = TIMEOUT_S) -> Any:
    """The notebook with its outputs, run in `folder` as Jupyter would. Raises at the first cell that fails."""
    import nbclient
    import nbformat

    notebook: Any = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=timeout_s, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def page_of(name: str, notebook: Any) -> tuple[str, dict[str, bytes]]:
    """The notebook as Markdown, and its pictures by file name."""
    pictures: dict[str, bytes] = {}
    head = f"<!-- What notebooks/{name}.ipynb shows; written by `python notebooks/render.py {name}`. -->"
    pieces = [head]
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            pieces.append(_text(cell["source"]).strip())
        elif cell["cell_type"] == "code":
            pieces.append(f"```python\n{_text(cell['source']).strip()}\n```")
            pieces += _outputs(name, cell.get("outputs", []), pictures)
    return "\n\n".join(pieces) + "\n", pictures


def _outputs(name: str, outputs: list[Any], pictures: dict[str, bytes]) -> Iterator[str]:
    for output in outputs:
        data = output.get("data", {})
        if "image/png" in data:
            file = f"{name}-{len(pictures) + 1}.png"
            pictures[file] = smaller(base64.b64decode(_text(data["image/png"])))
            yield f"![picture {len(pictures)} of {name}](../images/notebooks/{file})"
        else:
            text = _text(output.get("text", "")) or _text(data.get("text/plain", ""))
            if text.strip():
                lines = [line.rstrip() for line in text.rstrip().splitlines()]
                yield "\n".join(["```text", *lines, "```"])


def smaller(png: bytes) -> bytes:
    """The same picture in few colours: plots have no more."""
    from PIL import Image  # matplotlib brings it

    picture, written = Image.open(io.BytesIO(png)), io.BytesIO()
    picture.convert("RGB").quantize(COLOURS).save(written, "PNG", optimize=True)
    return written.getvalue()


def _text(source: str | list[str]) -> str:
    """A file may have text in one piece or by lines."""
    return source if isinstance(source, str) else "".join(source)


def main() -> None:
    """Render the named notebooks, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as 02_compare (default: all)")
    names = parser.parse_args().names or sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    for folder in (PAGES, PICTURES):
        folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            page, pictures = page_of(name, executed(NOTEBOOKS / f"{name}.ipynb", Path(place)))
        (PAGES / f"{name}.md").write_text(page, encoding="utf-8")
        for old in PICTURES.glob(f"{name}-*.png"):
            old.unlink()
        for file, content in pictures.items():
            (PICTURES / file).write_bytes(content)
        print(f"{PAGES / name}.md, {len(pictures)} pictures")


if __name__ == "__main__":
    main()
