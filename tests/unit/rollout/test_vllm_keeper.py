"""A server never outlives the run, however that ends."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from fsdptrain.vllm.server import supervisor as vllm_keeper

PARENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid()), sys.argv[2], "bash", "-c", "sleep 60 & sleep 60"])
time.sleep(60)
"""


def family(pid: int, size: int) -> list[psutil.Process]:
    end = time.monotonic() + 30
    while len(found := psutil.Process(pid).children(recursive=True)) < size:
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_run_takes_servers_and_weights_with_it(tmp_path, stopped):
    weights = tmp_path / "weights"
    weights.mkdir()
    run = subprocess.Popen([sys.executable, "-c", PARENT, str(vllm_keeper.__file__), str(weights)])
    processes = family(run.pid, 4)  # keeper, bash and two sleeps
    if stopped:
        for process in processes[1:]:
            process.suspend()
    run.send_signal(signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []
    assert not weights.exists()


def test_a_server_that_ends_takes_its_workers_with_it(tmp_path):
    command = [sys.executable, str(vllm_keeper.__file__), str(os.getpid()), str(tmp_path / "weights"), "bash", "-c"]
    keeper = subprocess.Popen([*command, f"sleep 60 & echo $! > {tmp_path / 'pid'}; exit 3"])
    assert keeper.wait(timeout=30) == 3
    worker, end = int((tmp_path / "pid").read_text()), time.monotonic() + 30
    while not is_dead(worker):  # the keeper has sent it the signal
        assert time.monotonic() < end
        time.sleep(0.05)


def is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
