"""Options that depend on the number of processes, how these are drawn, and options of servers."""

import pytest

from fsdptrain.config import Config, check_processes, check_world_size
from fsdptrain.dry_run import draw_grid
from fsdptrain.errors import ConfigError

STARTED = {"rollout_engine": "vllm-server", "rollout_num_servers": 2}
CONTEXT = {"context_parallel_size": 2}


@pytest.mark.parametrize(
    ("values", "world_size", "line"),
    [
        ({"fsdp_replicate_size": 2}, 3, "--fsdp-replicate-size 2 must divide the number of processes, 3"),
        ({"expert_parallel_size": 3}, 32, "--expert-parallel-size 3 must divide the processes of a replica, 32"),
        ({"tensor_parallel_size": 8, **CONTEXT}, 8, "-size 8 x --context-parallel-size 2 must divide the processes of"),
    ],
)
def test_sizes_divide_the_processes(values: dict[str, int], world_size: int, line: str) -> None:
    config = Config(hf_checkpoint="x", **values)
    check_world_size(config, 96)
    with pytest.raises(ConfigError, match=line):
        check_world_size(config, world_size)


def test_groups_of_processes_are_drawn() -> None:
    split = Config(hf_checkpoint="x", tensor_parallel_size=4, expert_parallel_size=16)
    grid, _, tensor, experts = draw_grid(split, 32)
    assert grid == "32 processes = 1 replicas x 8 shards x 4 tensor"
    assert tensor.startswith("tensor [0 1 2 3] [4 5 6 7] ")
    assert experts == "experts [0 1 2 3 ... 15] [16 17 18 19 ... 31]"
    assert draw_grid(Config(hf_checkpoint="x", tensor_parallel_size=2, **CONTEXT), 8) == [
        "8 processes = 1 replicas x 2 shards x 2 context x 2 tensor",
        "packs [0 1 2 3] [4 5 6 7]",
        "tensor [0 1] [2 3] [4 5] [6 7]",
        "context [0 2] [1 3] [4 6] [5 7]",
    ]


def test_processes_of_this_machine_must_fit() -> None:
    check_processes(config := Config(hf_checkpoint="x", **STARTED), world_size=2, local_world_size=2)
    with pytest.raises(ConfigError, match=r"--rollout-num-servers 2 starts servers on one machine.+--rollout-urls"):
        check_processes(config, world_size=4, local_world_size=2)
    with pytest.raises(ConfigError, match="--nproc-per-node 4 does not fit the 1 processes that were started on this"):
        check_processes(Config(hf_checkpoint="x", nproc_per_node=4), world_size=1, local_world_size=1)
