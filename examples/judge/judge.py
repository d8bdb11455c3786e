"""A judge of politeness behind the API of OpenAI. It stands in for a language model, and judges by a rule.

The rule: 0 points for another person or thing than in the task, else 1, and 3 more for each courtesy.
"""

import json
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

COURTESIES = ("could you", "please", "thank you")
MESSAGE = re.compile(r"<task>Ask (\w+) for (the \w+)\.</task>\s*<response>(.*?)</response>", re.DOTALL)


def score(message: str) -> int:
    """Return the score of a message in the form of rubric.txt, from 0 to 10."""
    match = MESSAGE.search(message)
    if match is None:
        return 0
    person, thing, response = match.groups()
    if person not in response or thing not in response:
        return 0
    return 1 + 3 * sum(courtesy in response.lower() for courtesy in COURTESIES)


@contextmanager
def serve() -> Iterator[tuple[str, str, str]]:
    """Serve the judge on a free port of this machine. Yield its URL, the name of its model, and its key."""
    key = secrets.token_hex(16)
    with _Server(("127.0.0.1", 0), partial(_Handler, f"Bearer {key}")) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", "rule", key
        finally:
            server.shutdown()


class _Server(ThreadingHTTPServer):
    request_queue_size = 64  # `--reward judge` opens 32 connections at once


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections
    wbufsize = -1  # sends the head and the body at once

    def __init__(self, authorization: str, *args: Any) -> None:
        self.authorization = authorization
        super().__init__(*args)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not secrets.compare_digest(self.headers.get("Authorization", ""), self.authorization):
            self._reply(401, {"error": {"message": "wrong key"}})
        elif self.path != "/v1/chat/completions":
            self._reply(404, {"error": {"message": f"no route {self.path}"}})
        else:
            content = f"<score>{score(json.loads(body)['messages'][-1]['content'])}</score>"
            self._reply(200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": content}}]})

    def _reply(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
