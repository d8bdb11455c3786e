"""torchrun on two hosts, each with a network of its own."""

import time

import pytest

from tests.e2e.command import TINY_RUN
from tests.e2e.two_hosts import ADDRESSES, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.matrix]


@pytest.fixture
def hosts():
    with two_hosts() as found:
        yield found


def start(hosts, host, argv, variables=None, *, max_restarts=0):
    launch = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", str(max_restarts)]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29500"]
    launch += ["--rdzv-conf", f"is_host={1 - host}", "--local-addr", ADDRESSES[host]]
    return hosts.start(host, [*launch, "-m", "fsdptrain", "--dist-timeout", "60", *argv], variables)


def test_ranks_of_two_hosts_find_each_other_and_one_with_another_option_is_refused_on_both(hosts, tmp_path):
    """gloo uses the interface between the hosts: by itself it would take the loopback device."""
    argv = ["--hf-checkpoint", str(tmp_path / "nowhere"), "--lr"]
    for agent in [start(hosts, host, [*argv, f"{host + 1}e-6"]) for host in range(2)]:
        _, err = agent.communicate(timeout=100)
        (line,) = (line for line in err.splitlines() if line.startswith("fsdptrain: "))
        assert line.startswith(
            "fsdptrain: all ranks must have the same versions and options: --lr is 1e-06 on rank 0 ("
        )
        assert " and 2e-06 on rank 1 (" in line


def test_an_agent_that_was_killed_is_replaced_and_the_run_resumes(hosts, checkpoint, tmp_path):
    folder = tmp_path / "run"
    argv = [*TINY_RUN, "--hf-checkpoint", str(checkpoint), "--output-dir", str(folder), "--save-interval", "1"]
    argv += ["--eval-interval", "1000", "--no-export", "--num-rollout", "1000", "--keep-last", "1000"]
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = [start(hosts, host, argv, variables, max_restarts=1) for host in range(2)]
    try:
        wait_for(folder, 2, agents)
        agents[1].kill()
        agents[1].communicate()
        agents[1] = start(hosts, 1, argv, variables, max_restarts=1)
        time.sleep(5)  # the first agent ends its rank when the new one has come
        wait_for(folder, newest(folder) + 2, agents)
    finally:
        for agent in agents:
            agent.terminate()
    for agent in agents:
        agent.communicate(timeout=60)
    names = sorted(path.name for path in (folder / "checkpoints").glob("step_*"))
    assert names == [f"step_{step:08d}" for step in range(1, len(names) + 1)]  # no step was saved twice


def newest(folder):
    return max((int(path.name[5:13]) for path in (folder / "checkpoints").glob("step_*")), default=0)


def wait_for(folder, step, agents):
    deadline = time.monotonic() + 240
    while newest(folder) < step:
        assert time.monotonic() < deadline, newest(folder)
        assert all(agent.poll() is None for agent in agents), [agent.communicate()[1] for agent in agents]
        time.sleep(0.05)
