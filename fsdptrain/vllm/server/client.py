"""One vLLM server, spoken to over HTTP. Every wait has an end, and nothing is sent twice.

ServerError
├── ServerGoneError       it cannot be reached, broke the connection, or its engine is dead
│   └── ServerSilentError it took the request and gave no answer before the deadline
└── ServerRefusedError    it is well, and said no
"""

import errno
import http.client
import io
import json
import math
import socket
import time
from collections.abc import Callable
from copy import copy
from typing import Any
from urllib.parse import urlsplit

from fsdptrain.errors import RolloutError

_POLL_S = 0.5  # how soon a request notices that its server is given up
_CONNECT_S = 30.0  # longest time to connect
_SHOWN = 400  # characters of a server's answer in an error

GivenUp = Callable[[], bool]  # nobody waits for the answer any more


class ServerError(Exception):
    """What became of one request. The message names the server and the request."""


class ServerGoneError(ServerError): ...


class ServerSilentError(ServerGoneError): ...


class ServerRefusedError(ServerError): ...


class _GivenUpError(Exception): ...


class _Answer(io.RawIOBase):
    """What a server sends, as `http.client` reads it. Waits in short steps: over TLS too, where a socket may have
    something to read before an answer begins."""

    def __init__(self, source: socket.socket, *, end: float, timeout: float, given_up: GivenUp) -> None:
        """`end` is when it must have begun [s, monotonic]; `timeout` is for each part after that. [s]"""
        self._socket, self._end, self._timeout, self._given_up = source, end, timeout, given_up

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            try:
                self._socket.settimeout(min(_POLL_S, max(0.01, self._end - time.monotonic())))
                count = self._socket.recv_into(buffer)
            except TimeoutError:
                if self._given_up():
                    raise _GivenUpError from None
                if time.monotonic() >= self._end:
                    raise
            else:
                self._end = time.monotonic() + self._timeout
                return count


class VLLMClient:
    """Requests to the server at `url`, with `api_key` where it wants one. Safe to use from several threads."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._given_up: GivenUp = lambda: False
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        assert parts.hostname is not None, "checked with the configuration"
        self.host = parts.hostname
        self._port = parts.port
        self._path = parts.path
        self._secure = parts.scheme == "https"
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def until(self, given_up: GivenUp) -> "VLLMClient":
        """The same, whose requests end, as those to a server that is gone, once `given_up()`."""
        client = copy(self)
        client._given_up = given_up
        return client

    def check_wanted(self, what: str) -> None:
        """ServerGoneError where nobody waits for it any more."""
        if self._given_up():
            raise ServerGoneError(f"{self.url} was given up during {what}")

    def get(self, path: str, *, timeout: float) -> Any:
        return self._request("GET", path, None, timeout, timeout)

    def post(self, path: str, body: Any = None, *, timeout: float) -> Any:
        return self._request("POST", path, body, timeout, timeout)

    def generate(self, body: Any, *, timeout: float, longest: float = math.inf) -> Any:
        """One completion. It may take `longest`; `timeout` is for all else. [s]"""
        return self._request("POST", "/inference/v1/generate", body, timeout, longest)

    def version(self, *, timeout: float) -> str:
        """The tag of the weights that the engine holds. The question goes through its scheduler: an answer is a sign
        of life of all of it."""
        return self.get("/weight_info", timeout=timeout)["weight_version"]

    def is_healthy(self, *, timeout: float) -> bool:
        try:
            self.get("/health", timeout=timeout)
        except ServerError:
            return False
        return True

    def _request(self, method: str, path: str, body: Any, timeout: float, longest: float) -> Any:
        """A connection of its own for each request: one that was kept open could have died unseen.

        `longest` is until the answer begins, all that comes before included; `timeout` for each transfer. [s]
        """
        what, end = f"{method} {path}", time.monotonic() + longest
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self.host, self._port, timeout=min(timeout, longest, _CONNECT_S))
        try:
            connection.connect()
            connection.sock.settimeout(timeout)
            connection.request(method, self._path + path, None if body is None else json.dumps(body), self._headers)
            answer: Any = _Answer(connection.sock, end=end, timeout=timeout, given_up=self._given_up)
            response = http.client.HTTPResponse(answer, method=method)
            response.begin()
            text = response.read().decode(errors="replace")
        except _GivenUpError:
            raise ServerGoneError(f"{self.url} was given up during {what}") from None
        except TimeoutError:
            raise ServerSilentError(f"{self.url} did not answer {what} in {min(timeout, longest):.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):  # not the server's fault
                raise RolloutError(f"{what}: no more files can be opened here: raise the limit (ulimit -n)") from None
            raise ServerGoneError(f"{self.url} broke off {what}: {type(error).__name__}: {error}") from None
        finally:
            connection.close()
        return self._content(response.status, text, what)

    def _content(self, status: int, text: str, what: str) -> Any:
        if status == 200:
            return json.loads(text) if text.lstrip()[:1] in ("{", "[") else None  # or a word of praise
        said = " ".join(text.split())[:_SHOWN]
        message = f"{self.url} answered {what} with status {status}: {said}"
        if status in (502, 503, 504) or "EngineDeadError" in said or "EngineCore encountered an issue" in said:
            raise ServerGoneError(message)
        raise ServerRefusedError(message)
