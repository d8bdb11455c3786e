"""Run model-written Python code under limits. `rewards/code.py` starts it as a script with `python -I`.

It reads [code, tests or null, token] as JSON from an open file and empties the file. It writes a byte: 0 if the code
has its own namespaces, else the errno of the refusal. If all tests have passed, it appends the token.

The code runs in a process that is forked before the file is read, so it has neither the file nor the token. The tests
stay in the first process and use the names of the code through a socket (`remote.py`).
"""

import builtins
import ctypes
import json
import os
import resource
import signal
import socket
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

CPU_S = 10  # of each process
MEMORY_BYTES = 2 * 2**30  # address space of each process
FILE_BYTES = 16 * 2**20  # of each file, also of the output
NUM_FILES = 64  # open ones, of each process
NUM_PROCESSES = 32  # and threads
NUM_PROCESSES_OF_USER = 4096  # without namespaces, where all processes of the user count

_NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000  # unshare(2): user, processes, network
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _CAPABILITY_VERSION_3 = 1, 4, 38, 0x20080522
_NOBODY = 65534


def main(descriptor: int, parent: int, has_tests: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    refusal = _enter_namespaces(libc)
    _die_with_parent(libc)
    if os.getppid() != parent:  # the parent has already died
        return
    if not refusal:
        _go_on_in_child(libc)  # process 1 of the namespace: when it ends, the kernel kills the others
    _go_on_in_child(libc)
    num_processes = NUM_PROCESSES_OF_USER if refusal else NUM_PROCESSES
    connection = _connect(libc, descriptor, num_processes) if has_tests else None
    if connection is not None and sys.platform == "linux":
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # other processes of the user cannot read its memory or files
    _limit(libc, num_processes)
    code, tests, token = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, bytes([refusal]), 0)
    if connection is None:
        os.close(descriptor)
        _run(code, "__main__")
        return
    program = code.encode(errors="surrogatepass")
    connection.sendall(len(program).to_bytes(8) + program)
    if not connection.recv(1):
        return  # it raised or exited
    peer = _remote().Peer(connection, None)
    _test(tests, peer)
    if not peer.is_gone:
        os.pwrite(descriptor, token.encode(), 1)
    os._exit(0)  # without exit handlers of the tests


def _connect(libc: ctypes.CDLL, descriptor: int, num_processes: int) -> socket.socket:
    """Return a socket to a new process that runs the code."""
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return ours
    _die_with_parent(libc)
    ours.close()
    os.close(descriptor)
    _limit(libc, num_processes)
    size = int.from_bytes(theirs.recv(8, socket.MSG_WAITALL))
    names = _run(theirs.recv(size, socket.MSG_WAITALL).decode(errors="surrogatepass"), "solution")
    theirs.sendall(b"1")
    _remote().Peer(theirs, names).serve()
    os._exit(0)


def _run(code: str, name: str) -> dict[str, Any]:
    module = sys.modules[name] = ModuleType(name)
    exec(compile(code, "solution.py", "exec"), module.__dict__)
    return module.__dict__


def _test(tests: str, peer: Any) -> None:
    """Run the tests with the names of the code. It can replace a built-in name only if the tests use no other names."""
    compiled = compile(tests, "tests.py", "exec")
    names = _names(compiled)
    is_own = all(hasattr(builtins, name) for name in names)
    solution = ModuleType("solution")

    class Names(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            if hasattr(builtins, name) and not is_own:
                raise KeyError(name)
            try:
                return peer.ask("get", None, name)
            except NameError:
                raise KeyError(name) from None

    def of_solution(name: str) -> Any:
        try:
            return peer.ask("get", None, name)
        except NameError:
            raise AttributeError(name) from None

    solution.__getattr__ = of_solution  # type: ignore[method-assign]
    sys.modules["solution"] = solution
    exec(compiled, Names(__name__="solution", __builtins__=builtins))


def _names(code: CodeType) -> set[str]:
    """Return the global and attribute names that the code uses."""
    return {*code.co_names}.union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _remote() -> ModuleType:
    spec = spec_from_file_location("remote", Path(__file__).with_name("remote.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _enter_namespaces(libc: ctypes.CDLL) -> int:
    """Return 0, or the errno of the failure (ENOSYS on systems without namespaces)."""
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
    main(*map(int, sys.argv[1:]))
