"""Checkpointing changes the saved activations, but no bit of a gradient."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fsdptrain.features.activation_memory.feature import Recomputed, enable_gradient_checkpointing
from fsdptrain.model.structure import decoder_layers, freeze_vision, tower_layers
from tests import vision_zoo, zoo
from tests.distributed.storages import bytes_saved
from tests.matrix import only

INPUT = (torch.arange(40) * 11 % zoo.VOCAB_SIZE)[None]


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("name", only(["qwen3_next", "gpt_oss"], zoo.ARCHITECTURES))
def test_gradients_are_bitwise_equal_and_names_stay(name: str, on_host: bool):
    without, with_it = zoo.build(name), zoo.build(name)
    enable_gradient_checkpointing(with_it, on_host=on_host)
    expected, found = _gradients(without), _gradients(with_it)
    assert list(found) == list(expected)
    assert [key for key in expected if not found[key].equal(expected[key])] == []
    assert list(with_it.state_dict()) == list(without.state_dict())


@pytest.mark.parametrize("trained", [True, False])
def test_a_vision_tower_is_recomputed_if_it_is_trained(trained: bool):
    model = vision_zoo.build("qwen3_vl")
    if not trained:
        freeze_vision(model)
    enable_gradient_checkpointing(model)
    for layers, expected in ((decoder_layers(model), True), (tower_layers(model), trained)):
        assert [isinstance(layer.forward, Recomputed) for layer in layers[:2]] == [expected] * len(layers[:2])


def test_dropout_draws_the_same_numbers_twice():
    without, with_it = (zoo.build("gpt2", resid_pdrop=0.5).train() for _ in range(2))
    enable_gradient_checkpointing(with_it)
    torch.manual_seed(3)
    expected = _gradients(without)
    torch.manual_seed(3)
    found = _gradients(with_it)
    assert all(found[key].equal(expected[key]) for key in expected)


def test_only_the_inputs_of_layers_are_saved_and_they_may_be_on_the_host(monkeypatch: pytest.MonkeyPatch):
    moved: list[Tensor] = []

    def save_on_cpu(**_: object) -> torch.autograd.graph.saved_tensors_hooks:
        def pack(x: Tensor) -> Tensor:
            if x.numel():  # torch 2.11 also saves an empty tensor for each layer
                moved.append(x)
            return x

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)

    monkeypatch.setattr("fsdptrain.features.activation_memory.feature.save_on_cpu", save_on_cpu)
    kept = []
    for kind in ({}, {"on_host": False}, {"on_host": True}):
        model = zoo.build("llama", num_hidden_layers=4)
        if kind:
            enable_gradient_checkpointing(model, **kind)
        kept.append(bytes_saved(model.model, lambda m=model: m.model(input_ids=INPUT, use_cache=False)))
        assert len(moved) == 4 * kind.get("on_host", False)
    assert kept[2] < kept[1] < 0.35 * kept[0]
    assert {x.shape for x in moved} == {(1, INPUT.shape[1], model.config.hidden_size)}


def _gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    logits = model(input_ids=INPUT, use_cache=False).logits
    logits.log_softmax(-1)[0, :-1].gather(-1, INPUT[0, 1:, None]).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}
