"""Checkpointing and offload change the saved activations, but no bit of a gradient."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from fsdptrain.errors import ConfigError
from fsdptrain.features.activation_memory.checkpointing import (
    Recomputed,
    check_selective,
    dear_operations,
    enable_gradient_checkpointing,
)
from fsdptrain.features.activation_memory.offload import enable_activation_offload
from fsdptrain.fsdp.transfers import Transfers
from fsdptrain.model.structure import decoder_layers, freeze_vision, tower_layers
from tests import vision_zoo, zoo
from tests.matrix import only

CHANGES_IN_PLACE = {"gpt_oss"}
INPUT = (torch.arange(40) * 11 % zoo.VOCAB_SIZE)[None]


def change(model: PreTrainedModel, kind: str) -> None:
    if "full" in kind:
        enable_gradient_checkpointing(model)
    if kind == "selective":
        enable_gradient_checkpointing(model, kind="selective")
    if "offload" in kind:
        enable_activation_offload(model, Transfers(torch.device("cpu")))


@pytest.mark.parametrize("kind", ["full", "selective", "offload", "full, offload"])
@pytest.mark.parametrize("name", only(["qwen3_next", "gpt_oss"], zoo.ARCHITECTURES))
def test_gradients_are_bitwise_equal_and_names_stay(name: str, kind: str):
    without, with_it = zoo.build(name), zoo.build(name)
    if kind == "selective" and name in CHANGES_IN_PLACE:
        with pytest.raises(ConfigError, match=f"selective does not work with {name}.*kind full"):
            check_selective(zoo.config(name))
        return
    change(with_it, kind)
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


def test_only_the_inputs_of_layers_are_saved():
    kept = []
    for checkpointing in (False, True):
        model = zoo.build("llama", num_hidden_layers=4)
        if checkpointing:
            enable_gradient_checkpointing(model)
        kept.append(_bytes_kept(model))
    assert kept[1] < 0.35 * kept[0]


def test_selective_saves_matrix_products_and_attention():
    names = {str(operation) for operation in dear_operations()}
    assert {"aten.mm.default", "aten.bmm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"} <= names
    assert "torch_attn._varlen_attn.default" in names
    seen: dict[bool, list[str]] = {}
    for kind in ("full", "selective"):
        model = zoo.build("llama")
        enable_gradient_checkpointing(model, kind=kind)
        output = model(input_ids=INPUT, use_cache=False).logits.sum()
        with Operations() as backward:
            output.backward()
        seen[kind == "selective"] = backward.names
    layers, forward = 2, {"aten.mm.default": 7, "aten._scaled_dot_product_flash_attention_for_cpu.default": 1}
    for name, count in forward.items():
        # torch stops a recomputation when all that the backward pass needs is there: before the last product
        again = seen[False].count(name) - seen[True].count(name)
        assert again in (layers * count, layers * (count - 1))
    assert seen[True].count("aten.rsqrt.default") == seen[False].count("aten.rsqrt.default") > 0


def test_selective_is_checked_before_a_model_is_loaded():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    check_selective(zoo.config("qwen3_moe"))
    assert torch.equal(torch.rand(4), expected)


def test_offload_copies_each_activation_once_and_no_weight():
    model = zoo.build("llama", num_hidden_layers=3)
    copied: list[int] = []

    def host_buffer(num_bytes: int) -> Tensor:
        copied.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    kept = _bytes_kept(model)
    enable_activation_offload(model, Transfers(torch.device("cpu")), host_buffer=host_buffer)
    loss = model(input_ids=INPUT, use_cache=False).logits.sum()
    assert sum(copied) == pytest.approx(kept, rel=0.1)  # not the rotary tables, not what is small
    largest = max(p.nbytes for layer in decoder_layers(model) for p in layer.parameters())
    assert largest not in copied
    loss.backward()
    with torch.no_grad():
        before = len(copied)
        model(input_ids=INPUT, use_cache=False)
    assert len(copied) == before


class Operations(TorchDispatchMode):
    """The names of the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    logits = model(input_ids=INPUT, use_cache=False).logits
    logits.log_softmax(-1)[0, :-1].gather(-1, INPUT[0, 1:, None]).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _bytes_kept(model: PreTrainedModel) -> int:
    """Bytes that autograd saves in a forward pass of the layers, without parameters."""
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
