"""Context parallelism refuses a model in one line, before its weights are loaded, and finds its recurrent mixers."""

from typing import Any

import pytest

from fsdptrain.errors import ConfigError
from fsdptrain.features.context_parallel.config import ContextParallelConfig
from fsdptrain.features.context_parallel.recurrent import check_context_parallel
from tests.families import tiny_meta

GATHER = {"context_parallel_recurrent": "gather"}
CASES: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "heads": ("gemma3", 3, {}, "--context-parallel-size 3 must divide the 4 attention heads of Gemma3ForCausalLM"),
    "heads and tensor": ("qwen3", 2, {"tensor_size": 4}, "2 x --tensor-parallel-size 4 must divide the 4"),
    "heads of one layer": ("laguna", 4, {}, "4 must divide the 6 heads of model.layers.1.self_attn.q_proj of Laguna"),
    "a state": ("qwen3_next", 2, {}, "model.layers.0.linear_attn of Qwen3NextForCausalLM carries a state"),
    "no state": ("qwen3", 2, GATHER, "--context-parallel-recurrent gather has no effect on Qwen3ForCausalLM"),
    "its own attention": ("bloom", 2, {}, "the attention of BloomForCausalLM is custom code"),
    "chunks": ("llama4_text", 2, {}, "mixes tokens by chunked_attention"),
    "an index": ("deepseek_v32", 2, {}, "mixes tokens by indexed_attention"),
    "a state that is not found": ("minimax", 2, GATHER, "mixes tokens by linear_attention"),
}
CHANGES = {"laguna": {"num_attention_heads_per_layer": [4, 6]}}
FOUND = {
    "qwen3_next": {f"model.layers.{i}.linear_attn" for i in range(3)},
    "falcon_h1": {f"model.layers.{i}.mamba" for i in range(2)},
    "lfm2": {"model.layers.0.conv"},
    "nemotron_h": {"model.layers.0.mixer"},
}


def recurrent_mixers(family: str, size: int, *, tensor_size: int = 1, **options: Any) -> list:
    model = tiny_meta(family, **CHANGES.get(family, {}))
    mixers = check_context_parallel(
        model, ContextParallelConfig(context_parallel_size=size, **options), tensor_size=tensor_size
    )
    return [name for name, module in model.named_modules() if any(module is x for x in mixers)]


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_does_not_allow_it_is_refused_in_one_line(case):
    family, size, options, words = CASES[case]
    with pytest.raises(ConfigError) as raised:
        recurrent_mixers(family, size, **options)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "--context-parallel" in str(raised.value)


@pytest.mark.parametrize("family", FOUND)
def test_recurrent_mixers_are_found_by_their_structure(family):
    assert set(recurrent_mixers(family, 2, **GATHER)) == FOUND[family]


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v3", "gemma3", "gpt2", "mixtral"])
def test_attention_models_have_no_recurrent_mixers(family):
    assert recurrent_mixers(family, 2) == []
