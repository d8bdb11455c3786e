"""The process behind `rewards/pool.py`, which passes calls on to the workers of pebble. No torch.

Calls do not go from the trainer to pebble directly: workers of multiprocessing import the main script again, and
inherit its variables and its seed of hashes.
"""

import ctypes
import os
import pickle
import signal
import sys
import threading
from concurrent.futures import Future, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import lru_cache, partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from pebble import ProcessExpired, ProcessPool

from fsdptrain.errors import describe
from fsdptrain.rewards.calls import Outcome, RewardCalls

_PR_SET_PDEATHSIG = 1  # prctl(2)
_TRIES = 3  # of a call: pebble gives up its pool if a worker ends while it knows of no running call


def main(descriptor: int, parent: int) -> None:
    """Answer calls until the parent closes the connection or dies."""
    _die_with_parent()
    if os.getppid() != parent:  # it died before
        return
    os.set_inheritable(descriptor, False)  # a process of the reward would keep the connection open
    connection, sending = Connection(descriptor), threading.Lock()
    reward, num_workers, timeout = pickle.loads(connection.recv_bytes())
    waiting: SimpleQueue[tuple[int, bytes, int] | None] = SimpleQueue()

    def receive() -> None:
        with suppress(EOFError, OSError):
            while True:
                number, samples = pickle.loads(connection.recv_bytes())
                waiting.put((number, samples, _TRIES))
        waiting.put(None)

    def reply(number: int, samples: bytes, tries: int, future: "Future[Any]") -> None:
        if isinstance(future.exception(), BrokenProcessPool) and tries > 1:
            waiting.put((number, samples, tries - 1))
            return
        with sending, suppress(OSError):
            connection.send_bytes(pickle.dumps((number, _outcomes(future))))

    threading.Thread(target=receive, daemon=True).start()
    pool = _open_pool(reward, num_workers)
    while call := waiting.get():
        if not pool.active:
            pool = _open_pool(reward, num_workers)
        future = pool.schedule(score, args=(reward, call[1]), timeout=timeout)
        future.add_done_callback(partial(reply, *call))
    os._exit(0)


def score(reward: bytes, samples: bytes) -> list[Outcome] | str:
    """Score the samples of one call. A text is the outcome of all."""
    try:
        loaded, calls = _load(reward), pickle.loads(samples)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # user code may raise anything while it is imported
        return f"a process cannot load the reward or the sample: {describe(error)}"
    return loaded.run(calls)


def _open_pool(reward: bytes, num_workers: int) -> ProcessPool:
    pool = ProcessPool(num_workers, context=get_context("spawn"), initializer=_begin, initargs=(reward,))
    assert pool.active  # starts the workers by this thread, which lives as long as they
    return pool


def _begin(reward: bytes) -> None:
    """Import the reward before the first call, whose time is limited."""
    _die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends C code that holds the GIL too
    with suppress(Exception, SystemExit):  # the calls report it
        _load(reward)


@lru_cache(1)
def _load(reward: bytes) -> RewardCalls:
    return pickle.loads(reward)


def _outcomes(future: "Future[Any]") -> Any:
    """The outcomes of a call; None if it was late; a text if its process ended."""
    error = future.exception()
    if isinstance(error, TimeoutError):
        return None
    if isinstance(error, ProcessExpired):
        return f"its process ended with {_ending(error.exitcode)}"
    return future.result() if error is None else describe(error)


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
