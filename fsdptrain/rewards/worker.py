"""The process behind `rewards/pool.py`, which answers one call at a time. No torch."""

import ctypes
import os
import pickle
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from fsdptrain.errors import describe

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main(descriptor: int, parent: int) -> None:
    """Load the reward and answer calls until the parent closes the connection or dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        return
    os.set_inheritable(descriptor, False)  # a process of the reward would keep the connection open
    connection = Connection(descriptor)
    os.register_at_fork(after_in_child=connection.close)
    with suppress(EOFError, OSError):  # the parent has closed the connection
        reward = _load(connection.recv_bytes())
        connection.send_bytes(b"loaded")  # before the first call, whose time is limited
        while True:
            calls = _load(connection.recv_bytes())
            why = next((each for each in (reward, calls) if isinstance(each, str)), "")
            connection.send_bytes(pickle.dumps(why or reward.run(calls)))
    os._exit(0)


def _load(pickled: bytes) -> Any:
    """Return the reward or the samples, or a text that says why they cannot be loaded."""
    try:
        return pickle.loads(pickled)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # user code may raise anything while it is imported
        return f"a process cannot load the reward or the sample: {describe(error)}"
