"""A process that computes rewards, started by `rewards/pool.py` in a new interpreter.

It reads the pickled reward, then lists of pickled samples. It writes a line of JSON for each: the reason why it cannot
load the reward ("": none), then lists of outcomes, [reward, parts] or the reason why the sample is unscored.
"""

import ctypes
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from fsdptrain.errors import describe
from fsdptrain.rewards.calls import Call, Outcome, RewardCalls
from fsdptrain.rewards.values import RewardResult

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main(descriptor: int, parent: int) -> None:
    """Load the reward and answer calls until the parent closes the connection or dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the prctl call
        return
    os.set_inheritable(descriptor, False)  # a process of the reward would keep the connection open
    connection = socket.socket(fileno=descriptor)
    messages = connection.makefile("rb")

    def reply(value: Any) -> None:
        connection.sendall(json.dumps(value).encode() + b"\n")

    with suppress(EOFError, OSError):  # the parent has closed the connection
        try:
            reward = pickle.load(messages)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # user code may raise anything while it is imported
            reply(describe(error))
            return
        reply("")
        while True:
            reply(score(reward, pickle.load(messages)))


def score(reward: RewardCalls, pickled: Sequence[bytes]) -> list[list[Any] | str]:
    """Score the samples of one call. One that cannot be loaded is left out."""
    calls, outcomes = dict[int, Call](), dict[int, Outcome]()
    for index, data in enumerate(pickled):
        try:
            calls[index] = pickle.loads(data)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # objects of the user
            outcomes[index] = f"the sample cannot be loaded in a process: {describe(error)}"
    if calls:
        outcomes |= zip(calls, reward.run([*calls.values()]), strict=True)
    return [[x.reward, x.rewards] if isinstance(x, RewardResult) else x for _, x in sorted(outcomes.items())]
