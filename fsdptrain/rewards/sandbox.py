"""A program that runs Python code of a model under limits. `rewards/code.py` starts it as a script with `python -I`.

It reads [code, tests or null, token] as JSON from an open file and empties the file. Then it writes a byte: 0 if the
code has its own namespaces, else the errno of the refusal. If all tests have passed, it appends the token.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from types import ModuleType

CPU_S = 10  # of each process
MEMORY_BYTES = 2 * 2**30  # address space of each process
FILE_BYTES = 16 * 2**20  # of each file, also of the output
NUM_FILES = 64  # open ones, of each process
NUM_PROCESSES = 32  # and threads
NUM_PROCESSES_OF_USER = 4096  # without namespaces, where those of the whole user count

_NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000  # unshare(2): user, processes, network
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _CAPABILITY_VERSION_3 = 1, 38, 0x20080522
_NOBODY = 65534


def main(descriptor: int, parent: int) -> None:
    code, tests, token = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    os.ftruncate(descriptor, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    refusal = _enter_namespaces(libc)
    _die_with_parent(libc)
    if os.getppid() != parent:  # it died before
        return
    os.pwrite(descriptor, bytes([refusal]), 0)
    if not refusal:
        _go_on_in_child(libc)  # process 1 of the namespace: the kernel kills all others when it ends
    _go_on_in_child(libc)
    _limit(libc, NUM_PROCESSES_OF_USER if refusal else NUM_PROCESSES)
    name = "__main__" if tests is None else "solution"
    module = sys.modules[name] = ModuleType(name)
    exec(compile(code, "solution.py", "exec"), module.__dict__)
    if tests is not None:
        exec(compile(tests, "tests.py", "exec"), module.__dict__)
        os.pwrite(descriptor, token.encode(), 1)


def _enter_namespaces(libc: ctypes.CDLL) -> int:
    """Return 0, or the errno of the refusal (ENOSYS on systems without namespaces)."""
    if sys.platform != "linux":
        return 38
    if os.geteuid() == 0:
        os.setresuid(_NOBODY, 0, 0)  # the kernel limits no processes of the real user root
    return ctypes.get_errno() if libc.unshare(_NAMESPACES) else 0


def _die_with_parent(libc: ctypes.CDLL) -> None:
    if sys.platform == "linux":
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _go_on_in_child(libc: ctypes.CDLL) -> None:
    """Return in a new process. This one exits with its code."""
    if pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    _die_with_parent(libc)


def _limit(libc: ctypes.CDLL, num_processes: int) -> None:
    for kind, limit in (
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, NUM_FILES),
        (resource.RLIMIT_NPROC, num_processes),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (most, most))
    if sys.platform == "linux":  # without capabilities, also those in its own namespace
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
