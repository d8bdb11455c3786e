"""Context parallelism refuses a model in one line, before its weights are loaded."""

from typing import Any

import pytest

from fsdptrain.errors import ConfigError
from fsdptrain.features.context_parallel.checks import check_context_parallel
from fsdptrain.features.sections import ContextParallelConfig
from tests.families import tiny_meta

CASES: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "heads": ("gemma3", 3, {}, "--context-parallel-size 3 must divide the 4 attention heads of Gemma3ForCausalLM"),
    "heads and tensor": ("qwen3", 2, {"tensor_size": 4}, "2 x --tensor-parallel-size 4 must divide the 4"),
    "heads of one layer": ("laguna", 4, {}, "4 must divide the 6 heads of model.layers.1.self_attn.q_proj of Laguna"),
    "a convolution": ("lfm2", 2, {}, "model.layers.0.conv.conv of Lfm2ForCausalLM carries a state"),
    "a state": ("qwen3_next", 2, {}, "model.layers.0.linear_attn of Qwen3NextForCausalLM carries a state"),
    "its own attention": ("bloom", 2, {}, "the attention of BloomForCausalLM is custom code"),
    "chunks": ("llama4_text", 2, {}, "mixes tokens by chunked_attention"),
    "an index": ("deepseek_v32", 2, {}, "mixes tokens by indexed_attention"),
    "a state that is not found": ("minimax", 2, {}, "mixes tokens by linear_attention"),
}
CHANGES = {"laguna": {"num_attention_heads_per_layer": [4, 6]}}


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_does_not_allow_it_is_refused_in_one_line(case):
    family, size, options, words = CASES[case]
    model, config = tiny_meta(family, **CHANGES.get(family, {})), ContextParallelConfig(context_parallel_size=size)
    with pytest.raises(ConfigError) as raised:
        check_context_parallel(model, config, **options)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "--context-parallel" in str(raised.value)
