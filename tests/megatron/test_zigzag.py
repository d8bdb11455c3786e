"""Tokens that are dealt over ranks and gathered around a mixer: outputs and gradients are those of one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptrain.megatron import zigzag
from fsdptrain.megatron.cpu_shims import install_cpu_shims
from tests.testing import spawn

SEQLENS = (8, 4, 12)
WIDTH = 6


class Mixer(nn.Module):
    """Every token depends on those before it in its sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.tanh(self.first(part)).cumsum(0) for part in x.split(SEQLENS)])


def make() -> tuple[Mixer, Tensor, Tensor]:
    torch.manual_seed(0)
    tokens = sum(SEQLENS)
    return Mixer(), torch.randn(tokens, WIDTH, dtype=torch.float64), torch.randn(tokens, WIDTH, dtype=torch.float64)


def whole() -> dict[str, Tensor]:
    mixer, x, wanted = make()
    x.requires_grad_()
    out = mixer(x)
    (out * wanted).sum().backward()
    assert x.grad is not None
    assert mixer.first.weight.grad is not None
    return {"out": out.detach(), "x": x.grad, "weight": mixer.first.weight.grad}


def sharded(pair: str) -> dict[str, Tensor]:
    """What one of the ranks has of it."""
    install_cpu_shims()
    from megatron.core import tensor_parallel as tp
    from megatron.core.tensor_parallel import mappings

    group = dist.group.WORLD
    assert group is not None
    in_zigzag = partial(zigzag.slice_zigzag, seqlens=SEQLENS, group=group)
    in_runs = partial(mappings._split_along_first_dim, group=group)
    in_copies = partial(tp.gather_from_sequence_parallel_region, tensor_parallel_output_grad=False, group=group)
    gather, cut, own = {
        "A": (partial(zigzag.gather_zigzag, seqlens=SEQLENS, group=group), in_zigzag, in_zigzag),
        "B": (in_copies, partial(tp.scatter_to_sequence_parallel_region, group=group), in_runs),
        "published": (partial(zigzag.gather_zigzag, seqlens=SEQLENS, group=group, sums=False), in_zigzag, in_zigzag),
    }[pair]
    mixer, x, wanted = make()
    mine = own(x).detach().clone().requires_grad_()
    gathered = gather(mine)
    assert torch.equal(gathered, x)
    out = cut(mixer(gathered))
    (out * own(wanted)).sum().backward()
    weight = mixer.first.weight.grad
    assert weight is not None
    if pair != "B":
        dist.all_reduce(weight)
    expected = whole()
    found = {
        "out": (out, own(expected["out"])),
        "x": (mine.grad, own(expected["x"])),
        "weight": (weight, expected["weight"]),
    }
    return {name: ((a - b).norm() / b.norm()).detach() for name, (a, b) in found.items()}


@pytest.mark.parametrize("pair", ["A", "B"])
def test_gradients_are_those_of_one_process(pair: str):
    for errors in spawn(2, sharded, pair):
        assert {name: float(error) for name, error in errors.items()} == pytest.approx(
            dict.fromkeys(errors, 0), abs=1e-14
        )


def test_the_published_way_drops_what_tokens_do_to_other_ranks():
    """An own slice in the gather's backward behind a plain slice: the weights are right, what lies before is not."""
    errors = spawn(2, sharded, "published")
    assert max(float(rank["x"]) for rank in errors) > 0.1
    assert all(float(rank["out"]) == 0 and float(rank["weight"]) < 1e-14 for rank in errors)


def test_a_rank_holds_a_chunk_of_each_end():
    assert zigzag.zigzag_order([8, 4], 2).tolist() == [0, 1, 6, 7, 8, 11, 2, 3, 4, 5, 9, 10]
