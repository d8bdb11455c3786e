"""The FLOPs of perf/mfu are those that torch counts for the stock model."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig

from fsdptrain.memory.flops import ModelFlops, model_flops
from tests import zoo

LENGTH = 64
ERNIE = Ernie4_5_MoeConfig(  # names its experts otherwise than most: moe_k of moe_num_experts
    vocab_size=zoo.VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, moe_intermediate_size=64, moe_num_experts=8, moe_k=2, moe_num_shared_experts=1,
    moe_layer_start_index=0, moe_layer_interval=1, pad_token_id=0,
)  # fmt: skip


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gpt2", "gemma3", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "ernie4_5_moe"]
)
def test_flops_of_a_forward_pass_are_those_that_torch_counts(name: str) -> None:
    config = ERNIE if name == "ernie4_5_moe" else zoo.config(name)
    config._experts_implementation = "eager"  # one product for each expert, all of them counted
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(5, 5 + LENGTH)[None], use_cache=False)
    counted = model_flops(model).forward([LENGTH], LENGTH, causal=False)
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_shared_prompt_counts_once_and_its_keys_for_each_response(frozen: bool) -> None:
    flops = ModelFlops(body_weights=7.0, head_weights=11, attention_width=3, frozen=frozen)
    whole = flops.training([10, 12], 5, causal=True)
    shared = flops.training([10, 12], 5, causal=True, prefixes=[0, 4])
    assert whole - shared == pytest.approx(flops.training([4], 0, causal=True))
    pairs = flops.forward([12], 0, causal=False, prefixes=[4]) - 2 * 7.0 * 8
    assert pairs == pytest.approx(4 * 3 * 8 * 12)
