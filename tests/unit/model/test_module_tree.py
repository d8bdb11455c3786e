"""The module tree is complete, counts every parameter, and names the kind of each part."""

import pytest

from fsdptrain.model.probes.random_copy import random_copy
from fsdptrain.model.structure import repeated_layers
from fsdptrain.tools.inspect.module_tree import module_tree
from tests import configs, zoo


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_every_parameter_is_counted_once_at_the_top_and_once_inside(name: str):
    model = zoo.meta(name)
    parts = module_tree(model)
    tied = sum(p.numel() for _, p in model.named_parameters(remove_duplicate=False)) - sum(
        p.numel() for p in model.parameters()
    )
    top = [part for part in parts if part.depth == 0]
    assert sum(part.count * part.numel for part in top) == sum(p.numel() for p in model.parameters()) + tied
    for place, layer in enumerate(parts):
        if layer.kind == "layer":
            inner = []
            for part in parts[place + 1 :]:
                if part.depth == 0:
                    break
                inner += [part] * (part.depth == 1)
            own = sum(p.numel() for p in dict(model.named_modules())[_first_path(layer.path)].parameters(recurse=False))
            assert sum(part.count * part.numel for part in inner) + own == layer.numel


def _first_path(path: str) -> str:
    """`model.layers.0` of `model.layers 0-3`."""
    words, _, span = path.partition(" ")
    return f"{words}.{span.replace('-', ',').split(',')[0].split(' ')[0]}"


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_each_layer_has_a_mixer_an_mlp_and_a_norm(name: str):
    parts = module_tree(zoo.meta(name))
    assert "other" not in {part.kind for part in parts}
    layers = [place for place, part in enumerate(parts) if part.kind == "layer"]
    for place, following in zip(layers, [*layers[1:], len(parts)], strict=True):
        kinds = {part.kind for part in parts[place + 1 : following]}
        assert kinds & {"attention", "recurrent mixer"}
        assert kinds & {"MLP", "mixture of experts"}
        assert "norm" in kinds


@pytest.mark.parametrize("name", zoo.MOE)
def test_experts_and_routers_are_named(name: str):
    kinds = {part.kind for part in module_tree(zoo.meta(name))}
    assert {"experts", "router", "mixture of experts"} <= kinds


def test_a_random_copy_keeps_one_layer_of_each_kind_of_each_list():
    model = configs.meta_model("gemma-3-12b")
    model.config.get_text_config().hidden_size = 64
    copy = random_copy(model.config)
    assert [type(layer).__name__ for layer in repeated_layers(copy)] == ["SiglipEncoderLayer"] + [
        "Gemma3DecoderLayer"
    ] * 2
    assert copy.config.get_text_config().layer_types == ["sliding_attention", "full_attention"]
