"""Servers of --rollout-urls that are not there, or answer something else."""

import functools
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from campaigns.inputs.case import Case, Place, Prepare, train
from tests.testing import free_port


class BadServer(BaseHTTPRequestHandler):
    """Answers by the first part of the path, e.g. /html/server_info."""

    ANSWERS: Mapping[str, tuple[int, bytes]] = {
        "html": (200, b"<html><body>hello</body></html>"),
        "500": (500, b"Internal Server Error"),
        "404": (404, b'{"detail":"Not Found"}'),
        "401": (401, b'{"error":"Unauthorized"}'),
        "503": (503, b"<html>" + b"x" * 5000),
        "redirect": (302, b""),
        "nothing": (200, b""),
        "broken": (200, b'{"vllm_config": '),
        "list": (200, b"[1, 2, 3]"),
        "null": (200, b"null"),
        "deep": (200, b"[" * 9000),
        "binary": (200, b'{"\xff\xfe\0":'),
        "strange": (200, b'{"vllm_config": [1]}'),
        "partial": (200, b'{"vllm_config": {"instance_id": "a", "model_config": {}}}'),
        "numbers": (200, b'{"vllm_config": {"instance_id": 5, "model_config": {"dtype": 5, "logprobs_mode": 1}}}'),
    }

    def do_GET(self) -> None:
        kind = self.path.split("/")[1]
        if kind == "slow":
            time.sleep(5.0)
        if kind in ("slow", "closes"):
            self.close_connection = True
            return
        if kind == "talks":
            self.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")
            self.close_connection = True
            return
        status, body = self.ANSWERS[kind]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) + (1000 if kind == "null" else 0)))
        self.send_header("Location", "/redirect/again")
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None: ...


@functools.cache
def server_port() -> int:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BadServer)
    Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


def servers(*urls: str, more: tuple[str, ...] = ()) -> Prepare:
    def prepare(place: Place) -> list[str]:
        named = [url.format(port=server_port(), nobody=free_port()) for url in urls]
        waits = ["--weight-sync-timeout", "2", "--rollout-timeout", "5"]
        return train(place, "--rollout-engine", "vllm-server", *waits, "--rollout-urls", *named, *more)

    return prepare


URLS: list[tuple[str, Prepare, tuple[str, ...]]] = [
    ("no scheme", servers("127.0.0.1:8000"), ("--rollout-urls", "127.0.0.1:8000")),
    ("other scheme", servers("ftp://127.0.0.1:8000"), ("--rollout-urls", "ftp:")),
    ("no host", servers("http://"), ("--rollout-urls", "http://")),
    ("only a port", servers("http://:8000"), ("--rollout-urls",)),
    ("port is text", servers("http://127.0.0.1:abc"), ("--rollout-urls", "abc")),
    ("port 99999", servers("http://127.0.0.1:99999"), ("--rollout-urls", "99999")),
    ("port -1", servers("http://127.0.0.1:-1"), ("--rollout-urls", "-1")),
    ("port 0", servers("http://127.0.0.1:0"), ("--rollout-urls",)),
    ("open bracket", servers("http://[::1"), ("--rollout-urls", "[::1")),
    ("no address in brackets", servers("http://[x]:80"), ("--rollout-urls", "[x]")),
    ("space", servers("http://127.0.0.1 :80"), ("--rollout-urls",)),
    ("line break", servers("http://127.0.0.1\n:80"), ("--rollout-urls",)),
    ("unicode", servers("http://höst.invalid:80"), ("--rollout-urls",)),
    ("empty label", servers("http://a..b:80"), ("--rollout-urls", "a..b")),
    ("long label", servers(f"http://{'a' * 300}:80"), ("--rollout-urls",)),
    ("user", servers("http://user:secret@127.0.0.1:80"), ("--rollout-urls",)),
    ("query", servers("http://127.0.0.1:80?x=1"), ("--rollout-urls",)),
    ("fragment", servers("http://127.0.0.1:80#x"), ("--rollout-urls",)),
    ("empty", servers(""), ("--rollout-urls",)),
    ("none", servers(), ("--rollout-urls",)),
    ("twice", servers("http://127.0.0.1:80", "http://127.0.0.1:80/"), ("--rollout-urls", "twice")),
    ("unknown host", servers("http://no.such.host.invalid:80"), ("--rollout-urls", "no.such.host")),
    ("public", servers("http://8.8.8.8:80"), ("--rollout-urls", "8.8.8.8")),
    ("no key", servers("http://127.0.0.1:80", more=("--rollout-api-key-env", "NO_SUCH")), ("--rollout-api-key-env",)),
    ("also started", servers("http://127.0.0.1:80", more=("--rollout-num-servers", "1")), ("--rollout-num-servers",)),
    ("more needed", servers("http://127.0.0.1:80", more=("--min-servers", "2")), ("--min-servers",)),
    ("nobody there", servers("http://127.0.0.1:{nobody}"), ("--rollout-urls",)),
    ("nobody at the second", servers("http://127.0.0.1:{port}/html", "http://127.0.0.1:{nobody}"), ("--rollout-urls",)),
    ("https of http", servers("https://127.0.0.1:{port}"), ("--rollout-urls",)),
    *((kind, servers(f"http://127.0.0.1:{{port}}/{kind}"), ("--rollout-urls",)) for kind in BadServer.ANSWERS),
    *(
        (kind, servers(f"http://127.0.0.1:{{port}}/{kind}"), ("--rollout-urls",))
        for kind in ("slow", "closes", "talks")
    ),
]


def cases() -> list[Case]:
    return [Case("endpoint", name, prepare, texts) for name, prepare, texts in URLS]
