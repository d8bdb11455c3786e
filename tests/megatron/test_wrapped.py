"""Models whose mixers megatron-core lacks: their classes and layouts. Logprobs and gradients: test_models.py."""

import pytest
import torch

from fsdptrain.megatron.config import MegatronConfig
from fsdptrain.megatron.forward import layout_of
from fsdptrain.megatron.hf_spec import hf_modules
from fsdptrain.megatron.model import WRAPPED
from fsdptrain.megatron.transformer_config import text_config
from fsdptrain.model.rows import Layout
from tests import zoo
from tests.megatron import cases, wrapped_cases
from tests.testing import spawn


@pytest.mark.matrix
def test_a_users_layers_take_rows_of_any_length_under_tensor_parallel():
    assert max(spawn(2, wrapped_cases.with_own_spec_and_tensor_parallel)) < 1e-5


def test_classes_are_those_that_the_models_own_layers_have():
    found = hf_modules(text_config(cases.config("qwen3_5")))
    assert [(name, made.__name__) for name, made in found.mixers] == [
        ("linear_attn", "Qwen3_5GatedDeltaNet"),
        ("self_attn", "Qwen3_5Attention"),
    ] * 2
    assert found.norm_class.__name__ == "Qwen3_5RMSNorm"
    other = hf_modules(zoo.config("llama"))  # nothing is listed: it is the same for any model of this form
    assert {made.__name__ for _, made in other.mixers} == {"LlamaAttention"}


@pytest.mark.parametrize(
    ("family", "split", "layout"),
    [
        ("qwen3", {}, {"engine bf16": "packed", "engine fp32": "padded", "plain": "padded"}),
        ("qwen3", {"spec": WRAPPED}, {"plain": "packed"}),
        ("qwen3_next", {"spec": "my.layers:mine"}, {"engine bf16": "packed", "plain": "padded"}),
        ("qwen3_next", {}, dict.fromkeys(("engine bf16", "engine fp32", "plain"), "packed")),
    ],
)
def test_packs_go_only_where_their_boundaries_are_understood(family: str, split: dict, layout: dict[str, Layout]):
    """Transformer Engine has no kernel for packs in float32."""
    for name, wanted in layout.items():
        dtype = torch.bfloat16 if "bf16" in name else torch.float32
        found = layout_of(zoo.config(family), MegatronConfig(**split), has_engine="engine" in name, dtype=dtype)
        assert found == wanted, name
