"""Layers and their kinds, head and counts of every family, on the meta device or not."""

import pytest
from torch import nn

from fsdptrain.errors import CheckpointError
from fsdptrain.memory.estimate import count_parameters
from fsdptrain.model.layer_kinds import module_kind, one_of_each_kind
from fsdptrain.model.structure import decoder_layers, lm_head
from tests import configs, zoo
from tests.matrix import only


@pytest.mark.parametrize("name", only(["qwen3_next", "gpt_oss"], zoo.ARCHITECTURES))
def test_layers_have_all_parameters_but_embedding_norm_and_head_and_tied_weights_count_once(name: str):
    model = zoo.build(name)
    layers, counts = decoder_layers(model), count_parameters(model)
    assert len(layers) == model.config.num_hidden_layers
    inside = {p for layer in layers for p in layer.parameters()}
    outside = [key for key, p in model.named_parameters() if p not in inside]
    ends = ("embed_tokens.weight", "wte.weight", "wpe.weight")
    assert all(key.endswith(ends) or "norm" in key or "head" in key or "ln_f" in key for key in outside), outside
    assert lm_head(model).weight.shape == (zoo.VOCAB_SIZE, zoo.HIDDEN)
    assert counts[0] == sum(t.numel() for t in {t.data_ptr(): t for t in model.parameters()}.values())
    assert count_parameters(zoo.meta(name)) == counts


def test_a_model_without_declared_layers_uses_its_largest_module_list():
    model = zoo.build("qwen3_moe")
    expected = decoder_layers(model)
    model._no_split_modules = set()
    assert decoder_layers(model) == expected


def test_a_model_without_layers_or_head_is_refused():
    model = zoo.build("llama")
    model.model.layers = nn.ModuleList()
    with pytest.raises(CheckpointError, match="no repeated layers"):
        decoder_layers(model)
    with pytest.raises(CheckpointError, match="no output embedding"):
        lm_head(zoo.build("llama").model)


@pytest.mark.parametrize("name", zoo.MOE)
def test_experts_are_named(name: str):
    assert "experts" in {module_kind(module) for module in zoo.meta(name).modules()}


def test_a_hybrid_has_a_recurrent_mixer():
    kinds = {type(m).__name__: module_kind(m) for m in zoo.meta("qwen3_next").modules()}
    assert kinds["Qwen3NextGatedDeltaNet"] == "recurrent mixer"
    assert kinds["Qwen3NextAttention"] == "other"


def test_a_vision_tower_and_the_text_are_lists_of_their_own():
    first = one_of_each_kind(configs.meta_model("gemma-3-12b"))
    assert sorted(first.values()) == [[0], [0, 5]]
