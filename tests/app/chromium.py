"""A headless Chromium: what it measured of a page, what it painted, and where it wanted to connect to."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --force-device-scale-factor=1"
).split()
OWN_HOSTS = re.compile(r"(^|\.)(google\.com|googleapis\.com|gstatic\.com|gvt1\.com)$")
"""Where a Chromium of any page wants to connect to, for itself."""
TIMEOUT_S = 100

PROBE = """\
<!DOCTYPE html><meta charset="utf-8"><body style="margin:0">
<iframe srcdoc="{page}" style="border:0;width:{width}px;height:900px"></iframe><pre id="found"></pre>
<script>
window.onload = () => {{
  const inside = document.querySelector("iframe").contentDocument;
  const box = (element) => {{
    const {{ left, top, right, bottom }} = element.getBoundingClientRect();
    return [left, top, right, bottom];
  }};
  const scrolls = (element) =>
    element && (getComputedStyle(element).overflowX !== "visible" || scrolls(element.parentElement));
  const wide = [...inside.body.querySelectorAll("*")].filter(
    (element) => !element.closest("g, defs") && box(element)[2] > {width} + 1 && !scrolls(element.parentElement));
  const drawn = [...inside.querySelectorAll("figure")].map((each) => [each.id, box(each.querySelector(".drawn"))]);
  const texts = [...inside.querySelectorAll("p, td, th, dd, li, figcaption, small, code")];
  const found = {{
    width: inside.documentElement.scrollWidth,
    height: inside.documentElement.scrollHeight,
    wide: wide.map((element) => element.outerHTML.slice(0, 80)),
    title: box(inside.querySelector("h1")),
    figures: Object.fromEntries(drawn),
    size: Math.min(...texts.map((element) => parseFloat(getComputedStyle(element).fontSize))),
  }};
  document.getElementById("found").textContent = JSON.stringify(found);
}};
</script>
"""


def browser() -> str:
    """The path of a Chromium; skips the test where there is none, and fails it in CI."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        problem = f"no browser: none of {', '.join(NAMES)} is installed"
        if os.environ.get("CI"):
            pytest.fail(problem)
        pytest.skip(problem)
    return found


class Chromium:
    """Each call is a browser of its own, with a profile that is thrown away."""

    def __init__(self, path: str, folder: Path) -> None:
        self._path = path
        self._folder = folder

    def measure(self, page: Path, width: int) -> dict[str, Any]:
        """Boxes of the page's parts in a window of `width` pixels, and what sticks out of it.

        The page lies in a frame of a probe page: it has no scripts, and its policy allows none.
        """
        text = re.sub(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", page.read_text(encoding="utf-8"))
        probe = self._folder / f"probe{width}.html"
        probe.write_text(PROBE.format(page=html.escape(text, quote=True), width=width), encoding="utf-8")
        dom = self._call("--dump-dom", f"--window-size={width + 100},1000", probe.as_uri())
        found = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
        assert found is not None, dom[:500]
        return json.loads(html.unescape(found.group(1)))

    def paint(self, page: Path, width: int, height: int, name: str, flags: Sequence[str] = ()) -> Path:
        """A screenshot."""
        target = self._folder / name
        self._call(f"--screenshot={target}", f"--window-size={width},{height}", *flags, page.as_uri())
        return target

    def wanted(self, page: Path) -> set[str]:
        """The hosts that the page wanted something from; none of them is ever reached."""
        log = self._folder / "net.json"
        self._call(f"--log-net-log={log}", f"--screenshot={self._folder / 'net.png'}", page.as_uri())
        urls = re.findall(r'"url":"https?://([^/"]+)', log.read_text(encoding="utf-8"))
        return {host for host in urls if not OWN_HOSTS.search(host.partition(":")[0])}

    def _call(self, *arguments: str) -> str:
        profile = f"--user-data-dir={self._folder / 'profile'}"
        no_network = "--host-resolver-rules=MAP * ~NOTFOUND"
        done = subprocess.run(
            [self._path, *FLAGS, profile, no_network, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout
