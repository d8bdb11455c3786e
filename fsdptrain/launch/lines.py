"""A connection between two machines: JSON objects, one a line, and a sign of life while there is nothing to say.

Plain sockets: a store of torch can hang in C++ where a link is cut, and knows no deadline for silence.
"""

import json
import socket
import time
from contextlib import suppress
from typing import Any

Message = dict[str, Any]
_CLOSES = 2.0  # [s]
_LONGEST = 1 << 20  # [bytes] of a message
_STRANGER = "is no machine of this run"


class Line:
    """One end. It never blocks."""

    def __init__(self, sock: socket.socket, *, timeout_s: float) -> None:
        """timeout_s: of silence, after which the other end is taken to be lost."""
        sock.setblocking(False)
        self.socket = sock
        self.why_lost: str | None = None
        self._timeout_s = timeout_s
        self._heard = self._said = time.monotonic()
        self._in, self._out = b"", b""

    @property
    def own_address(self) -> str:
        return self.socket.getsockname()[0].removeprefix("::ffff:")

    def send(self, message: Message) -> None:
        self._out += json.dumps(message).encode() + b"\n"
        self._said = time.monotonic()
        self._flush()

    def receive(self) -> list[Message]:
        """What has come; keeps the line alive. Where it is lost `why_lost` says why, and nothing comes any more."""
        self._read()
        now = time.monotonic()
        if self.why_lost is None and now - self._heard > self._timeout_s:
            self.why_lost = f"has not answered for {self._timeout_s:g} s (--node-timeout)"
        if self.why_lost is None and now - self._said > self._timeout_s / 5:
            self.send({"what": "alive"})
        self._flush()
        *lines, self._in = self._in.split(b"\n")
        try:
            messages: list[Message] = [json.loads(line) for line in lines]
            heard = [message for message in messages if message["what"] != "alive"]
        except (ValueError, TypeError, KeyError):
            self.refuse()
            return []
        if heard and heard[-1]["what"] == "leaving":
            self.why_lost = heard.pop()["why"]
        return heard

    def close(self) -> None:
        """After what was said has come to the other end, which closes then too."""
        self._flush()
        if self.why_lost is None:
            self.why_lost = "was left"
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)  # to close with something unread would take back what was said
                deadline = time.monotonic() + _CLOSES
                while (left := deadline - time.monotonic()) > 0:
                    self.socket.settimeout(left)
                    if not self.socket.recv(1 << 16):
                        break
        self.socket.close()

    def refuse(self) -> None:
        """Whoever it is says what no machine of a run would."""
        self.why_lost = _STRANGER

    def _read(self) -> None:
        """Once: one that talks without end keeps nobody from the others."""
        if self.why_lost is not None:
            return
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            self.why_lost = f"has gone ({error.strerror})"
            return
        if not data:
            self.why_lost = "has gone (its connection was closed)"
            return
        self._heard = time.monotonic()
        self._in += data
        if len(self._in) > _LONGEST:
            self.refuse()

    def _flush(self) -> None:
        while self._out and self.why_lost is None:
            try:
                sent = self.socket.send(self._out)
            except BlockingIOError:
                return
            except OSError as error:
                self.why_lost = f"has gone ({error.strerror})"
                return
            self._out = self._out[sent:]
