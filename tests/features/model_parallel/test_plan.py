"""Tensor and expert parallelism refuse a model in one line, before its weights are loaded."""

from typing import Any

import pytest

from fsdptrain.errors import ConfigError
from fsdptrain.features.model_parallel.plan import IS_NEW, split_plan
from tests.families import tiny_meta

CASES: dict[str, tuple[str, dict[str, Any], int, int, str]] = {  # changes; tensor and expert ranks
    "fewer experts than ranks, beside tensor ranks": ("deepseek_v3", {}, 2, 16, "16 must divide the 8 experts"),
    "experts that do not divide": ("qwen3_moe", {}, 1, 4, "--expert-parallel-size 4 must divide the 6 experts"),
    "packed experts": ("qwen3_moe", {}, 2, 1, "shard the experts with --expert-parallel-size"),
    "no experts": ("qwen3", {}, 1, 2, "no plan that splits experts of Qwen3ForCausalLM"),
    "heads": ("qwen3", {}, 4, 1, "--tensor-parallel-size 4 must divide the 2 key-value heads"),
    "heads of one layer": (
        "gemma4_text",
        {"num_attention_heads": 8, "num_key_value_heads": 4, "per_layer_config": {1: {"num_key_value_heads": 2}}},
        *(4, 1),
        "--tensor-parallel-size 4 must divide the 2 heads of model.layers.1.self_attn.k_proj of Gemma4ForCausalLM",
    ),
    "widths": ("qwen3", {"intermediate_size": 129}, 2, 1, "-size 2 does not divide model.layers.0.mlp"),
    "activations by their mean": ("gemma3n_text", {}, 2, 1, "drops activations by the mean of a whole layer"),
    "a plan for nothing": ("gpt_oss", {}, 2, 1, "splits 0% of the layers"),
}
if not IS_NEW:
    words = "does not divide lm_head.weight [265, 64] of Qwen3ForCausalLM: install transformers 5.23"
    CASES["vocabulary"] = ("qwen3", {"vocab_size": 265}, 2, 1, words)


def plan(family: str, changes: dict[str, Any], tensor: int, experts: int) -> dict[str, str]:
    return split_plan(tiny_meta(family, **changes), tensor_size=tensor, expert_size=experts)[1]


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_does_not_divide_is_refused_in_one_line(case):
    family, changes, tensor, experts, words = CASES[case]
    with pytest.raises(ConfigError) as raised:
        plan(family, changes, tensor, experts)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("family", "size"), [("gpt_oss", 4), ("deepseek_v3", 8), ("qwen3_moe", 6), ("qwen3_next", 2)])
def test_as_many_ranks_as_experts_are_allowed(family, size):
    assert plan(family, {}, 1, size)
