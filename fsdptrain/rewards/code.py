"""Python code of the response, tested in a sandbox: a child process with limits. See docs/rewards.md for its limits."""

import json
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from fsdptrain.errors import RewardError
from fsdptrain.rewards import sandbox
from fsdptrain.rewards.answers import find_answer, spoken
from fsdptrain.types import Prompt

log = logging.getLogger(__name__)

TEST_S = 10.0  # wall-clock limit of a test [s]
ALL_TESTS_S = 60.0  # of all tests of a response [s]
FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
PYTHON = {"python", "python3", "py"}


class Test(NamedTuple):
    """Python code with asserts, or the standard input and the expected output of a program."""

    code: str | None = None
    input: str = ""
    output: str = ""


def code(prompt: Prompt, response: str) -> Mapping[str, float] | None:
    """1 if the code passes all tests of the label, else 0; `passed` is the fraction. None without a label.

    `extract_code` selects the code. The label is Python code with asserts, a list of such texts,
    [{"input": ..., "output": ...}, ...], or {"inputs": [...], "outputs": [...]}, also as JSON. Raises RewardError for
    any other label.
    """
    if prompt.label is None:
        return None
    tests, program = parse_tests(prompt.label), extract_code(spoken(prompt, response))
    passed, deadline = 0, time.monotonic() + ALL_TESTS_S
    for test in tests if program else []:
        time_left = deadline - time.monotonic()
        if time_left <= 0:
            break
        passed += passes(program, test, min(TEST_S, time_left))
    return {"reward": float(passed == len(tests)), "passed": passed / len(tests)}


def extract_code(response: str) -> str:
    """Return the last closed Python block, else the last unmarked block, else the answer, else ""."""
    blocks = [(language.lower(), text) for language, text in FENCED.findall(response)]
    marked = [text for language, text in blocks if language in PYTHON]
    found = marked or [text for language, text in blocks if not language]
    return found[-1] if found else find_answer(response) or ""


def parse_tests(label: Any) -> list[Test]:
    if isinstance(label, str) and label.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):
            label = json.loads(label)
    if isinstance(label, str):
        return [Test(label)]
    with suppress(KeyError, TypeError, ValueError):
        if isinstance(label, Mapping):
            pairs = zip(label["inputs"], label["outputs"], strict=True)
            label = [{"input": given, "output": expected} for given, expected in pairs]
        tests = [Test(x) if isinstance(x, str) else Test(None, x["input"], x["output"]) for x in label]
        if tests and all(isinstance(text, str) for test in tests for text in (test.input, test.output)):
            return tests
    raise RewardError(
        "--reward code: the label must be Python code with asserts, a list of such codes, or texts as "
        f'[{{"input": ..., "output": ...}}] or {{"inputs": [...], "outputs": [...]}}, got {label!r:.80}'
    )


def passes(program: str, test: Test, timeout: float) -> bool:
    """Run a program with a test in an empty temporary folder. Raises RewardError if the sandbox does not start."""
    token = secrets.token_hex(16)  # the sandbox returns it after the tests: a program that exits early fails
    with (
        tempfile.TemporaryDirectory(prefix="fsdptrain-code-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as job,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as output,
    ):
        job.write(json.dumps([program, test.code, token]).encode())
        job.flush()
        given.write(test.input.encode(errors="replace"))
        given.seek(0)
        numbers = (job.fileno(), os.getpid(), int(test.code is not None))
        exit_code = _run(numbers, timeout, cwd=folder, stdin=given, stdout=output)
        report = os.pread(job.fileno(), 1 + len(token), 0)
        if not report or report.startswith(b"["):
            raise RewardError(f"--reward code: the sandbox did not start within {timeout:g} s (exit code {exit_code})")
        if report[0]:
            _warn(os.strerror(report[0]))
        if test.code is not None:
            return report[1:] == token.encode()
        printed = os.pread(output.fileno(), sandbox.FILE_BYTES, 0).decode(errors="replace")
        return exit_code == 0 and _lines(printed) == _lines(test.output)


def _run(numbers: Sequence[int], timeout: float, *, cwd: str, stdin: Any, stdout: Any) -> int | None:
    """Return the exit code of the sandbox, or None after the deadline. Kill all processes of the group."""
    process = subprocess.Popen(
        [sys.executable, "-I", sandbox.__file__, *map(str, numbers)],
        cwd=cwd,
        env={"OMP_NUM_THREADS": "1", **{name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}},
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        pass_fds=(numbers[0],),
        start_new_session=True,
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@cache
def _warn(reason: str) -> None:
    line = "--reward code runs programs of the model with access to the network: the kernel denies namespaces (%s)"
    log.warning(line, reason)
