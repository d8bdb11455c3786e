"""Termination of ranks together with their parent process."""

import ctypes
import os
import signal
import sys

from fsdptrain.rank_variables import LAUNCHER_PID

_PR_SET_PDEATHSIG = 1  # prctl(2)


def exit_with_parent() -> None:
    """Let Linux end this rank when its agent (ours or torchrun's) dies. Call it before slow imports."""
    if sys.platform != "linux":
        return
    agent = int(os.environ.get(LAUNCHER_PID, os.getppid()))
    if LAUNCHER_PID in os.environ:  # which sends SIGINT, also if it runs in the background, where SIGINT is ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != agent:  # the agent died before the prctl call
        sys.exit(1)
