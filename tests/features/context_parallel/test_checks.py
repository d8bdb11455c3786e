"""Context parallelism refuses layers that the short sequences of the probe would not show to be wrong."""

import pytest

from fsdptrain.errors import ConfigError
from fsdptrain.features.context_parallel.feature import check_layer_kinds
from tests.families import tiny_meta

KINDS = {
    "lfm2": "conv",
    "qwen3_next": "linear_attention",
    "llama4_text": "chunked_attention",
    "deepseek_v32": "indexed_attention",
}


@pytest.mark.parametrize("family", KINDS)
def test_layers_that_need_whole_sequences_are_refused(family: str) -> None:
    with pytest.raises(ConfigError, match=f"--context-parallel-size: layers of {KINDS[family]} need whole sequences"):
        check_layer_kinds(tiny_meta(family).config)
