"""Run a server no longer than its trainer: `python supervisor.py PARENT FOLDERS COMMAND...`

PARENT is the process id of the trainer, FOLDERS are its temporary folders, separated by ":". The server gets its own
process group. When the trainer is gone, however it ended, the group is killed and the folders are deleted. When the
server ends, its group is killed too. Needs only the standard library; Linux.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1  # prctl(2)
_POLL_S = 0.3


def supervise(parent: int, folders: list[str], command: list[str]) -> int:
    libc = ctypes.CDLL(None)

    def die_with_supervisor() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # runs the `finally` below
    server = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_supervisor)
    try:
        while server.poll() is None:
            if os.getppid() != parent:
                for folder in folders:
                    shutil.rmtree(folder, ignore_errors=True)
                break
            time.sleep(_POLL_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # includes its engine and workers, also when they are stopped
    return server.wait()


if __name__ == "__main__":
    sys.exit(supervise(int(sys.argv[1]), sys.argv[2].split(os.pathsep), sys.argv[3:]) % 256)
