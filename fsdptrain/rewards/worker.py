"""A process that computes rewards, started by `rewards/pool.py` in a new interpreter.

It reads pickled lists of calls, and writes a line of JSON per sample: [index, reward, parts] or [index, reason, whether
the value has a wrong type]. Its first line is null, or the reason why it cannot load the reward.
"""

import ctypes
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from fsdptrain.errors import describe
from fsdptrain.rewards.calls import Outcome, RewardCalls, WrongValue
from fsdptrain.rewards.values import RewardResult
from fsdptrain.types import Prompt

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main(descriptor: int, parent: int) -> None:
    """Load the reward from the first message, then answer the others until the parent closes the connection or dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the prctl call
        return
    connection = socket.socket(fileno=descriptor)
    messages = connection.makefile("rb")
    try:
        reward = pickle.load(messages)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # user code may raise anything while it is imported
        connection.sendall(json.dumps(describe(error)).encode() + b"\n")
        return
    serve(reward, lambda: pickle.load(messages), connection)


def serve(reward: RewardCalls, receive: Callable[[], Sequence[tuple[Prompt, str]]], connection: socket.socket) -> None:
    """Score the samples of each message, and send each outcome as soon as it is known."""
    with suppress(EOFError, OSError):  # the parent has closed the connection
        connection.sendall(b"null\n")
        while True:
            reward.run(receive(), lambda index, outcome: connection.sendall(encode(index, outcome)))


def encode(index: int, outcome: Outcome) -> bytes:
    if isinstance(outcome, RewardResult):
        return json.dumps([index, outcome.reward, outcome.rewards]).encode() + b"\n"
    return json.dumps([index, str(outcome), isinstance(outcome, WrongValue)]).encode() + b"\n"


def decode(index: int, value: float | str, more: dict[str, float] | bool) -> tuple[int, Outcome]:
    if isinstance(value, str):
        return index, WrongValue(value) if more else value
    assert isinstance(more, dict)
    return index, RewardResult(value, more)
