"""Options that depend on the number of processes, and options of servers."""

import pytest

from fsdptrain.config import Config, check_processes, check_world_size
from fsdptrain.errors import ConfigError

STARTED = {"rollout_engine": "vllm-server", "rollout_num_servers": 2}


def test_replicas_divide_the_world():
    config = Config(hf_checkpoint="x", fsdp_replicate_size=2)
    check_world_size(config, 4)
    with pytest.raises(ConfigError, match="--fsdp-replicate-size 2 must divide the number of processes, 3"):
        check_world_size(config, 3)


def test_servers_of_a_run_on_several_machines_are_started_by_the_user():
    check_processes(config := Config(hf_checkpoint="x", **STARTED), world_size=2, local_world_size=2)
    with pytest.raises(ConfigError, match=r"--rollout-num-servers 2 starts servers on one machine.+--rollout-urls"):
        check_processes(config, world_size=4, local_world_size=2)
