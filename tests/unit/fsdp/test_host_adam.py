"""An optimizer with state on the host is bitwise the same one on the device."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdptrain.config import OptimConfig
from fsdptrain.fsdp import host_adam
from fsdptrain.fsdp.optimizer import Optimizer
from fsdptrain.fsdp.optimizer_state import state_tensors

SIZES = st.lists(st.sampled_from([(1,), (7,), (16, 3), (33, 5), (4, 2, 9), (0,)]), min_size=1, max_size=4)


class Weights(nn.Module):
    def __init__(self, sizes: list[tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(size, generator=generator) for size in sizes]
        self.weights = nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])


def trained(sizes: list[tuple[int, ...]], num_steps: int, *, num_without: int = 0, **values) -> dict[str, torch.Tensor]:
    """`num_without`: so many of the first parameters never get a gradient."""
    model = Weights(sizes)
    config = OptimConfig(lr=0.1, weight_decay=0.1, lr_decay_style="linear", **values)
    optimizer = Optimizer(model, config, total_steps=10, fp16=False)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        for p in list(model.parameters())[num_without:]:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.clip()
        optimizer.step()
    return dict(model.named_parameters()) | state_tensors(optimizer)


@settings(deadline=None, max_examples=20)
@given(sizes=SIZES, num_steps=st.integers(1, 3), piece=st.sampled_from([16, 64, 1 << 20]))
def test_offloaded_moments_change_no_bit(sizes, num_steps, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_adam, "PIECE", piece)
        found = trained(sizes, num_steps, offload_optimizer=True)
    wanted = trained(sizes, num_steps)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_parameters_without_a_gradient_do_not_change():
    sizes: list[tuple[int, ...]] = [(16, 3), (7,), (4, 5)]
    found = trained(sizes, 2, num_without=2, offload_optimizer=True)
    wanted = trained(sizes, 2, num_without=2)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert [found[f"weights.{i}.step"].item() for i in range(3)] == [0.0, 0.0, 2.0]
