"""A server never outlives the run, however that ends, and one that cannot start is an error with its log."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fsdptrain.errors import RolloutError
from fsdptrain.vllm.server import supervisor
from fsdptrain.vllm.server.process import ServerProcess
from tests.event_loop import run_in_loop
from tests.testing import wait_until

pytestmark = pytest.mark.slow

PARENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid()), sys.argv[2], "bash", "-c", "sleep 60 & sleep 60"])
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("script", "seconds", "message"),
    [
        ("echo 'ValueError: no such model' >&2; exit 1", 60.0, r"ended during its start \(.*log: ValueError: no such"),
        ("sleep 60", 0.5, r"was not up in 0 s"),
    ],
)
def test_a_server_that_cannot_start_is_an_error_with_its_log(
    tmp_path: Path, script: str, seconds: float, message: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    process = ServerProcess(str(python), [], tmp_path / "server0.log", api_key="key")
    try:
        with pytest.raises(RolloutError, match=f"{process.client.url} {message}"):
            run_in_loop(process.wait_until_up(seconds))
    finally:
        process.close()
    assert not process._imports.exists()


def family(pid: int, size: int) -> list[psutil.Process]:
    wait_until(lambda: len(psutil.Process(pid).children(recursive=True)) >= size)
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_run_takes_servers_and_folders_with_it(tmp_path, stopped):
    folders = [tmp_path / "weights", tmp_path / "imports"]
    for folder in folders:
        folder.mkdir()
    run = subprocess.Popen([sys.executable, "-c", PARENT, str(supervisor.__file__), os.pathsep.join(map(str, folders))])
    processes = family(run.pid, 4)  # supervisor, bash and two sleeps
    if stopped:
        for process in processes[1:]:
            process.suspend()
    run.send_signal(signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []
    assert not any(folder.exists() for folder in folders)


def test_a_server_that_ends_takes_its_workers_with_it(tmp_path):
    command = [sys.executable, str(supervisor.__file__), str(os.getpid()), str(tmp_path / "weights"), "bash", "-c"]
    supervisor_process = subprocess.Popen([*command, f"sleep 60 & echo $! > {tmp_path / 'pid'}; exit 3"])
    assert supervisor_process.wait(timeout=30) == 3
    worker = int((tmp_path / "pid").read_text())
    wait_until(lambda: is_dead(worker))  # the signal was sent


def is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
