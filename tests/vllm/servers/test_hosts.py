"""A run on one host, and its server on another: weights come over the network, in buckets."""

import os
import signal
import subprocess
import time

import pytest

from fsdptrain.config import Config
from fsdptrain.vllm.server.build import server_arguments
from tests.e2e.command import TINY_RUN, metrics_of
from tests.e2e.two_hosts import ADDRESSES, TwoHosts, two_hosts
from tests.vllm import models as checkpoints
from tests.vllm.servers import cases
from tests.vllm.servers.conftest import PYTHON

pytestmark = pytest.mark.matrix

URL = f"http://{ADDRESSES[1]}:8000"
_HEALTH = f"import urllib.request; urllib.request.urlopen('{URL}/health', timeout=5)"


def wait_until_up(hosts: TwoHosts, server: subprocess.Popen) -> None:
    end = time.monotonic() + 400
    look = ["ip", "netns", "exec", hosts.names[0], str(PYTHON), "-c", _HEALTH]
    while subprocess.run(look, capture_output=True, check=False).returncode:
        assert server.poll() is None, server.communicate()[1][-2000:]
        assert time.monotonic() < end
        time.sleep(0.5)


def test_a_run_takes_a_server_of_another_host(tmp_path):
    model, folder = checkpoints.save("tied", tmp_path / "model"), tmp_path / "run"
    argv = ["--hf-checkpoint", str(model), *TINY_RUN, "--num-rollout", "2", "--output-dir", str(folder)]
    argv += ["--rollout-engine", "vllm-server", "--rollout-urls", URL]
    argv += ["--weight-transfer", "gloo", "--weight-sync-dir", str(tmp_path), "--max-tokens-per-gpu", "1024"]
    arguments = server_arguments(Config(**cases.options(model, max_tokens_per_gpu=1024)), model, on_gpu=False)
    listen = ["vllm.entrypoints.openai.api_server", "--host", ADDRESSES[1], "--port", "8000"]
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": cases.KEY, "OMP_WAIT_POLICY": "PASSIVE"}
    variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}  # nobody reads what it says
    with two_hosts() as hosts:
        server = hosts.start(1, [*listen, *arguments], variables, python=str(PYTHON))
        try:
            wait_until_up(hosts, server)
            run = hosts.start(0, ["fsdptrain", *argv], {"ROLLOUT_API_KEY": cases.KEY})
            try:
                _, err = run.communicate(timeout=300)
            finally:
                run.kill()
        finally:
            os.kill(server.pid, signal.SIGTERM)
            server.communicate(timeout=60)
    assert run.returncode == 0, err
    found = [row["mismatch/abs_max"] for row in metrics_of(folder) if "mismatch/abs_max" in row]
    assert len(found) == 2
    assert max(found) < 1e-4
