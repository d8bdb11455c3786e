"""Layers of one kind are grouped, and experts and recurrent mixers are known by their classes."""

import pytest

from fsdptrain.model.layer_kinds import layer_kinds
from fsdptrain.model.module_kind import module_kind
from fsdptrain.model.probes.random_copy import random_copy
from fsdptrain.model.structure import repeated_layers
from tests import configs, zoo


@pytest.mark.parametrize("name", zoo.MOE)
def test_experts_are_named(name: str):
    assert "experts" in {module_kind(module) for module in zoo.meta(name).modules()}


def test_a_hybrid_has_a_recurrent_mixer():
    kinds = {type(m).__name__: module_kind(m) for m in zoo.meta("qwen3_next").modules()}
    assert kinds["Qwen3NextGatedDeltaNet"] == "recurrent mixer"
    assert kinds["Qwen3NextAttention"] == "other"


def test_a_vision_tower_and_the_text_are_lists_of_their_own():
    spans = {(type(kind.layer).__name__, kind.span) for kind in layer_kinds(configs.meta_model("gemma-3-12b"))}
    assert spans == {
        ("SiglipEncoderLayer", "0-26"),
        ("Gemma3DecoderLayer", "0-4, 6-10 ..."),
        ("Gemma3DecoderLayer", "5, 11 ..."),
    }


def test_a_random_copy_keeps_one_layer_of_each_kind_of_each_list():
    model = configs.meta_model("gemma-3-12b")
    model.config.get_text_config().hidden_size = 64
    copy = random_copy(model.config)
    assert [type(layer).__name__ for layer in repeated_layers(copy)] == ["SiglipEncoderLayer"] + [
        "Gemma3DecoderLayer"
    ] * 2
    assert copy.config.get_text_config().layer_types == ["sliding_attention", "full_attention"]
