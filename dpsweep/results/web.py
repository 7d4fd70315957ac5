"""The report of a sweep while it runs, served to a browser on this machine.

Whoever may log in here can connect to its ports, and the state folder may be private: so the
address has a random part, as Jupyter's has, and any other path is answered with 404.
"""

import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from dpsweep.core.errors import ConnectionRefused, DpSweepError
from dpsweep.results.figures import figures
from dpsweep.results.live import LiveView
from dpsweep.results.page import live_page, live_panel, page
from dpsweep.store.state_dir import SweepFolder
from dpsweep.store.study import Study

_HOST = "127.0.0.1"
_REST = 10
"""After a page was made, no new one for so many times as long: trials want the processor."""

_SOCKET_SECONDS = 10
"""Browsers open connections ahead of use and leave them silent."""


class LivePage:
    """Answers of the server. It reads the study and writes nothing.

    Args:
        folder: Its folder, for the confusion matrix and links; None for none.
    """

    def __init__(self, study: Study, view: LiveView, folder: SweepFolder | None = None) -> None:
        self._study, self._view, self._folder = study, view, folder
        self._lock = threading.Lock()  # a browser asks from several threads
        self._version = ""
        self._made: tuple[str, str] | None = None
        self._rests_until = 0.0

    def answer(self, path: str) -> tuple[str, str] | None:
        """The content type and text of a path; None if there is no such path."""
        if path == "":
            return "text/html", live_page(self._study.sweep.name)
        with self._lock:
            if path == "now":
                return "application/json", self._now()
            return ("text/html", self._report()) if path == "report" else None

    def _now(self) -> str:
        """The live view, and the version of the report: a browser then knows if it has it."""
        driven = self._view.look()
        if time.monotonic() > self._rests_until or not driven:
            self._version = f"{self._view.num_ended} {driven}" if self._study.best() else ""
        links = self._folder.links() if self._folder else {}
        return json.dumps({"panel": live_panel(self._view, links), "version": self._version})

    def _report(self) -> str:
        if self._made is None or self._made[0] != self._version:
            begun = time.monotonic()
            drawn = figures(self._study, self._folder)
            self._made = self._version, page(self._study, drawn, with_library=False)
            self._rests_until = time.monotonic() + _REST * (time.monotonic() - begun)
        return self._made[1]


@contextmanager
def serve_page(live: LivePage, port: int) -> Iterator[str]:
    """Serve on 127.0.0.1 within this block; gives the address, with its random part.

    Args:
        port: Where to listen; 0 for any port that is free.

    Raises:
        ConnectionRefused: If the port cannot be listened on.
    """
    root = f"/{secrets.token_urlsafe(16)}/"

    class Handler(BaseHTTPRequestHandler):
        timeout = _SOCKET_SECONDS

        def do_GET(self) -> None:  # the name that the standard library calls
            path = urlsplit(self.path).path
            try:
                answer = live.answer(path.removeprefix(root)) if path.startswith(root) else None
            except DpSweepError as e:
                self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(e))
                return
            if answer is None:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", "Not here. See the whole address.")
                return
            self._send(HTTPStatus.OK, *answer)

        def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            for name, value in (
                ("Content-Type", f"{kind}; charset=utf-8"),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"),
                ("Referrer-Policy", "no-referrer"),
                ("X-Content-Type-Options", "nosniff"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A line a request is no news."""

    try:
        server = ThreadingHTTPServer((_HOST, port), Handler)
    except OSError as e:
        raise ConnectionRefused(
            f"--port {port}: {_HOST}:{port} cannot be used ({e.strerror}). Leave --port out for "
            f"any port that is free"
        ) from e
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{_HOST}:{server.server_port}{root}"
    finally:
        server.shutdown()
        server.server_close()
