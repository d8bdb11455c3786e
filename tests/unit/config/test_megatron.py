"""Each flag of --backend megatron has an effect, or is refused in one line with the way out; so are the others' beside
it."""

import pytest

from fsdptrain.config import Config, check_world_size
from fsdptrain.config.grid import across_nodes, draw_grid
from fsdptrain.errors import ConfigError

# (what is refused beside --backend megatron, what the line names, what repairs it)
REFUSED = [
    (
        {"tensor_parallel_size": 2},
        ["--tensor-parallel-size", "--megatron-tensor-parallel"],
        {"tensor_parallel_size": 1},
    ),
    ({"expert_parallel_size": 2}, ["--megatron-expert-parallel"], {"expert_parallel_size": 1}),
    ({"fsdp_cpu_offload": True}, ["--fsdp-cpu-offload", "--backend fsdp"], {"fsdp_cpu_offload": False}),
    ({"lora_rank": 8}, ["--lora-rank", "leave it out"], {"lora_rank": 0}),
    ({"async_save": True}, ["--async-save"], {"async_save": False}),
    ({"router_replay": "scoring"}, ["--router-replay"], {"router_replay": "off"}),
    ({"prefix_sharing": "on"}, ["--prefix-sharing"], {"prefix_sharing": "auto"}),
    (
        {"megatron_context_parallel": 2, "megatron_moe_dispatcher": "allgather"},
        ["--megatron-moe-dispatcher allgather", "--megatron-context-parallel", "alltoall"],
        {"megatron_moe_dispatcher": "alltoall"},
    ),
    ({"megatron_sequence_parallel": True}, ["--megatron-tensor-parallel above 1"], {"megatron_tensor_parallel": 2}),
    (
        {"megatron_pipeline_parallel": 2, "megatron_moe_dispatcher": "allgather"},
        ["--megatron-moe-dispatcher allgather", "alltoall"],
        {"megatron_moe_dispatcher": "alltoall"},
    ),
    ({"megatron_tensor_parallel": 2, "rollout_top_k": 20}, ["--rollout-top-k"], {"rollout_top_k": None}),
]


@pytest.mark.parametrize(("values", "named", "repair"), REFUSED)
def test_what_megatron_does_not_do_is_one_line_with_the_way_out(values, named, repair) -> None:
    values = {"hf_checkpoint": "x", "backend": "megatron", "bf16": False, **values}
    with pytest.raises(ConfigError) as caught:
        Config(**values)
    assert "\n" not in str(caught.value)
    assert [part for part in named if part not in str(caught.value)] == []
    Config(**{**values, **repair})


def test_flags_of_megatron_are_refused_without_it() -> None:
    with pytest.raises(ConfigError, match="--megatron-expert-parallel has no effect without --backend megatron"):
        Config(hf_checkpoint="x", megatron_expert_parallel=2)


def test_ranks_that_share_packs_are_neighbours_and_must_fit() -> None:
    config = Config(hf_checkpoint="x", backend="megatron", megatron_tensor_parallel=2, megatron_pipeline_parallel=2)
    assert config.pack_copies == 4
    check_world_size(config, 8)
    assert draw_grid(config, 8)[1] == "packs [0 1 2 3] [4 5 6 7]"
    dealt = Config(hf_checkpoint="x", backend="megatron", megatron_context_parallel=2)
    assert dealt.pack_copies == 2
    assert draw_grid(dealt, 4)[0].startswith("4 processes = 2 replicas x 2 context x 1 pipeline x 1 tensor")
    with pytest.raises(ConfigError, match="must divide the number of processes, 6"):
        check_world_size(config, 6)
    experts = Config(hf_checkpoint="x", backend="megatron", megatron_expert_parallel=4)
    with pytest.raises(ConfigError, match=r"--megatron-expert-parallel 4 x .* must divide the processes of a stage, 6"):
        check_world_size(experts, 6)


def test_groups_are_drawn_as_ranks_are_numbered() -> None:
    split = {"megatron_tensor_parallel": 2, "megatron_pipeline_parallel": 2, "megatron_expert_parallel": 2}
    config = Config(hf_checkpoint="x", backend="megatron", **split)
    assert draw_grid(config, 8)[1:] == [
        "packs [0 1 2 3] [4 5 6 7]",
        "tensor [0 1] [2 3] [4 5] [6 7]",
        "stages [0 2] [1 3] [4 6] [5 7]",
        "experts [0 4] [1 5] [2 6] [3 7]",
    ]


def test_groups_that_wait_in_each_layer_should_lie_within_a_node() -> None:
    """Those of experts are as far apart as the ranks of a replica are many; stages wait for each other seldom."""
    options = {"hf_checkpoint": "x", "backend": "megatron"}
    experts = Config(**options, megatron_expert_parallel=4)
    assert list(across_nodes(experts, 4)) == []
    behind = Config(**options, megatron_expert_parallel=4, megatron_pipeline_parallel=2)
    (line,) = across_nodes(behind, 4)
    assert line.startswith("--megatron-expert-parallel 4: its groups do not lie within a node of 4 processes")
    assert list(across_nodes(Config(**options, megatron_pipeline_parallel=4), 2)) == []
