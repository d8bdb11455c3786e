"""Recomputing a layer changes what is kept in memory, and nothing else."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fsdptrain.models.checkpointing import enable_gradient_checkpointing
from tests import zoo

INPUT = (torch.arange(40) * 11 % zoo.VOCAB_SIZE)[None]


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_gradients_are_bitwise_equal_and_names_stay(name: str):
    without, with_it = zoo.build(name), zoo.build(name)
    enable_gradient_checkpointing(with_it)
    expected, found = _gradients(without), _gradients(with_it)
    assert list(found) == list(expected)
    assert [key for key in expected if not found[key].equal(expected[key])] == []
    assert list(with_it.state_dict()) == list(without.state_dict())


def test_dropout_draws_the_same_numbers_twice():
    without, with_it = (zoo.build("gpt2", resid_pdrop=0.5).train() for _ in range(2))
    enable_gradient_checkpointing(with_it)
    torch.manual_seed(3)
    expected = _gradients(without)
    torch.manual_seed(3)
    found = _gradients(with_it)
    assert all(found[key].equal(expected[key]) for key in expected)


def test_only_the_inputs_of_layers_are_kept():
    kept = []
    for checkpointing in (False, True):
        model = zoo.build("llama", num_hidden_layers=4)
        if checkpointing:
            enable_gradient_checkpointing(model)
        kept.append(_bytes_kept(model))
    assert kept[1] < 0.35 * kept[0]


def _gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    logits = model(input_ids=INPUT, use_cache=False).logits
    logits.log_softmax(-1)[0, :-1].gather(-1, INPUT[0, 1:, None]).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _bytes_kept(model: PreTrainedModel) -> int:
    """What autograd saves in a forward pass of the layers, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.model(input_ids=INPUT, use_cache=False).last_hidden_state
    assert output.requires_grad
    return sum(saved.values())
