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
from tests.tensors import same

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
@given(sizes=SIZES, steps=st.integers(1, 3), without=st.integers(0, 2), piece=st.sampled_from([16, 64, 1 << 20]))
def test_offloaded_moments_change_no_bit_and_no_parameter_without_a_gradient(sizes, steps, without, piece):
    without = min(without, len(sizes) - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_adam, "PIECE", piece)
        found = trained(sizes, steps, num_without=without, offload_optimizer=True)
    assert same(found, trained(sizes, steps, num_without=without))
    assert [found[f"weights.{i}.step"] for i in range(len(sizes))] == [0] * without + [steps] * (len(sizes) - without)
