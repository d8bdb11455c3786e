"""A page in headless Chromium, over the DevTools protocol on a pipe (file descriptors 3 and 4).

Chromium is `chromium` on PATH, or FSDPTRAIN_CHROMIUM. Tests are skipped without it; FSDPTRAIN_REQUIRE_CHROMIUM=1 makes
them fail there instead.
"""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_WAIT_S = 20.0


def chromium() -> str:
    """Return the path of Chromium. Skips the test, or fails it, if there is none."""
    found = shutil.which(os.environ.get("FSDPTRAIN_CHROMIUM", "chromium"))
    if found is None:
        missing = "needs chromium on PATH, or its path in FSDPTRAIN_CHROMIUM: apt-get install chromium"
        pytest.fail(missing) if os.environ.get("FSDPTRAIN_REQUIRE_CHROMIUM") == "1" else pytest.skip(missing)
    return found


class Browser:
    """One tab. `messages` holds what the page wrote to its console, and errors, with those of the content policy."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = os.fdopen(commands, "wb"), os.fdopen(answers, "rb")
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.messages: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.requests: list[str] = []  # their addresses

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        command |= {"sessionId": self._session} if self._session else {}
        self._commands.write(json.dumps(command).encode() + b"\0")
        self._commands.flush()
        while True:
            message = self._read()
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def get(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str, timeout: float = _WAIT_S) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + timeout
        while not self.get(condition):
            assert time.monotonic() < end, f"{condition} is not true after {timeout} s; console: {self.messages}"
            time.sleep(0.05)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def close(self) -> None:
        self._session = None
        self.call("Browser.close")
        self._commands.close()
        self._answers.close()

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._answers.fileno(), 1 << 16)
            assert data, "chromium has ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        parameters = message.get("params", {})
        if message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.messages.append(json.dumps(parameters)[:1000])
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        return message


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start Chromium with a profile of its own."""
    path = chromium()
    (from_us, commands), (answers, to_us) = os.pipe(), os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        shell = f'exec 3<&{from_us} 4>&{to_us}; exec "$@"'  # Chromium reads from 3 and writes to 4
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", path, *flags, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(from_us, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        try:
            browser = Browser(commands, answers)
            yield browser
            browser.close()
            process.wait(timeout=_WAIT_S)
        finally:
            process.kill()
            process.wait()
