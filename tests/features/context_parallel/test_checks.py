"""Context parallelism refuses, before loading, what the probe would not find, and heads that do not divide."""

import pytest

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.features.context_parallel.feature import check_model
from tests.families import tiny_meta

REFUSED = {
    "lfm2": "--context-parallel-size: layers of conv need whole sequences",
    "qwen3_next": "layers of linear_attention need",
    "llama4_text": "layers of chunked_attention need",
    "deepseek_v32": "layers of indexed_attention need",
    "gemma3": "--context-parallel-size, times --tensor-parallel-size, is 8 and must divide the 4 attention heads",
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_does_not_allow_it_is_refused_in_one_line(family: str) -> None:
    config = Config(hf_checkpoint="any", context_parallel_size=4, tensor_parallel_size=2)
    with pytest.raises(ConfigError) as raised:
        check_model(tiny_meta(family).config, config)
    assert REFUSED[family] in str(raised.value)
    assert "\n" not in str(raised.value)
