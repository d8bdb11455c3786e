"""A program with a Python of its own that runs many episodes at a time: programs/episode_server.py describes the lines.

A program that ends is started again by the next episode. Nothing is unpickled, and nothing listens on a port.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from fsdptrain.agents.harness import MODEL, AgentError, program_environment
from fsdptrain.errors import ConfigError
from fsdptrain.types import Prompt

_PROGRAMS = Path(__file__).with_name("programs")
_START_S = 600.0  # to load an environment and its data
_CANCEL_S = 3.0  # to answer that an episode is cancelled
_END_S = 10.0  # to close sandboxes and tool servers

Rows = list[dict[str, Any]]


class Worker:
    """Starts the program. Raises ConfigError if it cannot be started, or cannot open its environment.

    name: of the environment, for errors
    program: file name in programs/
    python: of the other environment: a path, or a command
    options: JSON values for the program
    """

    def __init__(self, name: str, program: str, *, python: str, options: Mapping[str, Any]) -> None:
        self._where = f"--environment {name}"
        self._command = [_found(python, self._where, name), "-u", str(_PROGRAMS / program)]
        try:
            self._options = json.dumps(options)
        except TypeError as error:
            raise ConfigError(f"{self._where}: --environment-kwargs must be JSON values: {error}") from error
        self._is_closed = False
        self._lock = threading.Lock()
        self._process = _Process(self._command, self._options)
        try:
            self.rows: Rows = self._process.rows.result(_START_S)
        except AgentError as error:
            self._process.close()
            raise ConfigError(f"{self._where}: {error}") from error
        except TimeoutError as error:
            self._process.close()
            raise ConfigError(f"{self._where}: its environment was not open after {_START_S:g} s") from error

    async def run(self, prompt: Prompt, *, url: str, key: str) -> Any:
        """Run an episode whose model calls go to `url` with `key`, and return its reward. Raises AgentError."""
        with self._lock:
            if self._is_closed:
                raise AgentError("the run has ended")
            if self._process.has_ended:
                self._process = _Process(self._command, self._options)
            process = self._process
        await asyncio.shield(asyncio.wrap_future(process.rows))
        return await process.run(
            {
                "prompt": prompt.source,
                "label": prompt.label,
                "metadata": dict(prompt.metadata),
                "url": url,
                "key": key,
                "model": MODEL,
            }
        )

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._process.close()


def check_num_tasks(num_tasks: int | None, name: str) -> None:
    if num_tasks is not None and num_tasks < 1:
        raise ConfigError(f"--environment {name}: num_tasks={num_tasks} in --environment-kwargs must be at least 1")


def _found(python: str, where: str, name: str) -> str:
    path = shutil.which(python)
    if path is None:
        raise ConfigError(f"{where}: there is no program {python}: `make {name}` builds it, or set python=...")
    return path


@dataclass
class _Process:
    """One run of the program."""

    command: list[str]
    options: str
    rows: Future[Rows] = field(default_factory=Future)
    has_ended: bool = False
    _answers: dict[int, Future[Any]] = field(default_factory=dict)
    _number: int = 0
    _lines: SimpleQueue[str | None] = field(default_factory=SimpleQueue)  # to the program; None closes its input
    _errors: deque[str] = field(default_factory=lambda: deque(maxlen=20))  # last lines of its error output
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of `_answers`, `_number` and `has_ended`

    def __post_init__(self) -> None:
        self._popen = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=program_environment(),
            start_new_session=True,  # a process group, to end what it starts too
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._lines.put(self.options)
        tail = threading.Thread(target=self._keep_errors, args=[self._popen.stderr], daemon=True)
        writer = threading.Thread(target=self._write, args=[self._popen.stdin], daemon=True)
        self._reader = threading.Thread(target=self._read, args=[self._popen.stdout, tail], daemon=True)
        for thread in (tail, writer, self._reader):
            thread.start()

    async def run(self, request: Mapping[str, Any]) -> Any:
        answer: Future[Any] = Future()
        with self._lock:
            if self.has_ended:
                raise AgentError("its process has ended")
            number = self._number = self._number + 1
            self._answers[number] = answer
        try:
            self._lines.put(json.dumps({"id": number, **request}))
        except TypeError as error:
            raise AgentError(f"a prompt must consist of JSON values: {error}") from error
        waiting = asyncio.wrap_future(answer)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self._lines.put(json.dumps({"cancel": number}))
            done, _ = await asyncio.wait({waiting}, timeout=_CANCEL_S)
            if not done:  # it does not respond to anyone
                self._kill()
            else:
                waiting.exception()  # an exception that nobody reads would be logged
            raise

    def close(self) -> None:
        """Let the program end what it has started, and kill it if it does not end."""
        self._lines.put(None)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(_END_S)
        self._kill()
        self._reader.join(_CANCEL_S)

    def _kill(self) -> None:
        with self._lock:
            self.has_ended = True  # the next episode starts another one
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def _write(self, stream: IO[str]) -> None:
        with suppress(OSError), stream:  # the reader reports the end
            while (line := self._lines.get()) is not None:
                stream.write(line + "\n")
                stream.flush()

    def _keep_errors(self, stream: IO[str]) -> None:
        with stream:
            self._errors.extend(stream)

    def _read(self, stream: IO[str], tail: threading.Thread) -> None:
        with stream:
            for line in stream:
                try:
                    message = json.loads(line)
                except ValueError:
                    self._errors.append(f"it printed {line.strip():.80} in place of JSON: is python=... right?")
                    self._kill()
                    break
                self._receive(message)
        code = self._popen.wait()
        self._kill()  # what it has started
        self._lines.put(None)
        tail.join(1.0)
        last = next((line.strip() for line in reversed(self._errors.copy()) if line.strip()), "no error output")
        with self._lock:
            self.has_ended = True
            waiting = [self.rows, *self._answers.values()]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(AgentError(f"its process ended with exit code {code}: {last:.200}"))

    def _receive(self, message: Mapping[str, Any]) -> None:
        answer: Future[Any] | None = self.rows
        if "id" in message:
            with self._lock:
                answer = self._answers.pop(message["id"], None)
        if answer is None or answer.done():
            return
        if "error" in message:
            answer.set_exception(AgentError(message["error"]))
        else:
            answer.set_result(message["reward"] if "id" in message else message["rows"])
