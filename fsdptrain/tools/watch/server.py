"""Serve the page and the data of runs on loopback.

Everything that a run holds is for the owner of the key only. A path of a request selects one of two answers and is
never a path of a file. A page of another site cannot read anything: it has no key, and its host name, even if it
resolves to this machine, is refused (DNS rebinding).
"""

import json
import secrets
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from fsdptrain.errors import ConfigError
from fsdptrain.tools.watch.page import render
from fsdptrain.tools.watch.run_data import RunData

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")  # of this machine, also through an SSH tunnel
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class WatchServer(ThreadingHTTPServer):
    """Serves `runs` until `shutdown`. Raises ConfigError if the port cannot be used."""

    daemon_threads = True

    def __init__(self, runs: Sequence[RunData], port: int = 0) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self.key = secrets.token_urlsafe(24)
        self.page = render()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(f"--port {port} cannot be used: {error.strerror}; choose another") from error

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/?key={self.key}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors, except for a browser that has gone away."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def data(self, seen: Sequence[str]) -> dict[str, Any]:
        """Return what has changed in each run. seen: the cursors that the page has, in order of the runs."""
        with self._lock:
            for run in self._runs:
                run.poll()
            cursors = [*seen, *[""] * len(self._runs)]
            return {"runs": [run.payload(cursor) for run, cursor in zip(self._runs, cursors, strict=False)]}


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "fsdptrain", ""
    timeout = 30  # [s] for a client that sends nothing

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        path, _, text = self.path.partition("?")
        query = parse_qs(text)
        if host not in _NAMES:
            self._answer(HTTPStatus.FORBIDDEN, b"unknown host name")
        elif path == "/" and self._is_key(query.get("key", [""])[0]):
            page = self.server.page
            policy = f"{page.policy}; frame-ancestors 'none'"
            self._answer(HTTPStatus.OK, page.html.encode(), "text/html", {"Content-Security-Policy": policy})
        elif path == "/data" and self._is_key(self.headers.get("Authorization", "").removeprefix("Bearer ")):
            data = self.server.data(query.get("seen", [""])[0].split(","))
            self._answer(HTTPStatus.OK, json.dumps(data, separators=(",", ":")).encode(), "application/json")
        elif path in ("/", "/data"):
            self._answer(HTTPStatus.FORBIDDEN, b"the key is missing: open the address that fsdptrain watch has printed")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"not found")

    def _is_key(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self.server.key.encode())

    def _answer(
        self, status: HTTPStatus, body: bytes, kind: str = "text/plain", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet: request lines hold the key."""
