"""Termination of ranks together with their parent process."""

import ctypes
import os
import signal
import sys

from fsdptrain.rank_variables import RUN_ID

LAUNCHER_PID = "FSDPTRAIN_LAUNCHER_PID"  # set for ranks started by the fsdptrain command
_PR_SET_PDEATHSIG = 1  # prctl(2)


def has_fsdptrain_launcher() -> bool:
    return LAUNCHER_PID in os.environ


def exit_with_parent() -> None:
    """Let Linux end this rank when its agent (ours or torchrun's) dies. Call it before slow imports."""
    if RUN_ID not in os.environ or sys.platform != "linux":
        return
    agent = int(os.environ.get(LAUNCHER_PID, os.getppid()))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != agent:  # the agent died before the prctl call
        sys.exit(1)
