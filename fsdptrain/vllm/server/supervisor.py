"""Run a server and end it with the run: `python vllm_keeper.py PARENT FOLDER COMMAND...`

PARENT is the process id of the trainer, FOLDER holds its weights for the servers. The server gets a process group of
its own. When the trainer is gone, however it ended, the whole group is killed and the folder is deleted; when the
server ends, so does its group and this program. Needs nothing but the standard library; Linux.
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


def keep(parent: int, folder: str, command: list[str]) -> int:
    libc = ctypes.CDLL(None)

    def die_with_keeper() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # to the `finally` below
    server = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_keeper)
    try:
        while server.poll() is None:
            if os.getppid() != parent:
                shutil.rmtree(folder, ignore_errors=True)
                break
            time.sleep(_POLL_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # its engine and workers too; a stopped group as well
    return server.wait()


if __name__ == "__main__":
    sys.exit(keep(int(sys.argv[1]), sys.argv[2], sys.argv[3:]) % 256)
