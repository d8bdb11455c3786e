"""Models whose mixers megatron-core lacks: their layouts. Logprobs and gradients: test_models.py."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from fsdptrain.megatron.config import MegatronConfig
from fsdptrain.megatron.forward import layout_of
from fsdptrain.megatron.model import WRAPPED
from fsdptrain.model.rows import Layout
from tests import zoo


def other_rotation(transformer_config: Any, hf_config: PreTrainedConfig, *, vp_stage: int | None = None) -> Any:
    """Layers as a user may get them wrong: queries and keys turned by neighbors and not by halves, by the same angles.

    Of this no fact is reported.
    """
    from fsdptrain.megatron.model import layer_spec

    transformer_config.rotary_interleaved = True
    return layer_spec(transformer_config, hf_config, vp_stage=vp_stage)


@pytest.mark.parametrize(
    ("family", "split", "layout"),
    [
        ("qwen3", {}, {"engine bf16": "packed", "engine fp32": "padded", "plain": "padded"}),
        ("qwen3", {"spec": WRAPPED}, {"plain": "packed"}),
        ("qwen3_next", {}, {"engine bf16": "packed", "plain": "padded"}),
        ("deepseek_v3", {}, dict.fromkeys(("engine bf16", "engine fp32", "plain"), "packed")),
    ],
)
def test_packs_go_only_where_their_boundaries_are_understood(family: str, split: dict, layout: dict[str, Layout]):
    """Transformer Engine has no kernel for packs in float32."""
    for name, wanted in layout.items():
        dtype = torch.bfloat16 if "bf16" in name else torch.float32
        found = layout_of(zoo.config(family), MegatronConfig(**split), has_engine="engine" in name, dtype=dtype)
        assert found == wanted, name
