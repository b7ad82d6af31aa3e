"""A headless Chromium that is told what to do, by Chrome's DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from typing import Any

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    # A page that nobody looks at is drawn all the same.
    "--disable-renderer-backgrounding",
    "--disable-backgrounding-occluded-windows",
    "--disable-background-timer-throttling",
    "--remote-debugging-pipe",
    # Nothing but this machine may be reached.
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)


def chromium() -> str | None:
    """The browser's program, if it is installed."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


class Browser:
    """One page of a browser that ends with the `with` block."""

    def __init__(self, program: str, width: int = 1600, height: int = 1000):
        self._home = tempfile.TemporaryDirectory(prefix="mcjax-browser-", ignore_cleanup_errors=True)
        to_browser, self._out = os.pipe()
        inward, from_browser = os.pipe()
        # The protocol speaks on descriptors 3 and 4.
        start = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        options = [*FLAGS, f"--window-size={width},{height}", f"--user-data-dir={self._home.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", start, program, *options],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._answers = os.fdopen(inward, "rb")
        self._calls = 0
        self._rest = b""
        pages = [each for each in self._call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        target = pages[0]["targetId"] if pages else self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)  # the browser ends with its pipe
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._home.cleanup()

    def open(self, url: str) -> None:
        self._call("Page.navigate", session=self._session, url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise. Raises `RuntimeError` for its errors."""
        answer = self._call(
            "Runtime.evaluate", session=self._session, expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """What the page looks like, as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", session=self._session)["data"])

    def click(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._call(
                "Input.dispatchMouseEvent", session=self._session, type=kind, x=x, y=y, button="left", clickCount=1
            )

    def _call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._calls:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._answers.fileno(), 1 << 20)
            if not more:
                raise RuntimeError("the browser has ended")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
