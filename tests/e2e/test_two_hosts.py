"""torchrun on two hosts, each with a network of its own."""

import pytest

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
