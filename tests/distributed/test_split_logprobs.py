"""Vocabulary-parallel logprobs equal those of the whole vocabulary."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdptrain.model.logprobs import chunked_logprobs
from fsdptrain.model.vocab_parallel import vocab_parallel_logprobs
from tests.testing import spawn

VOCABULARY, WIDTH, TOKENS = 25, 7, 23  # uneven on every number of ranks
OPTIONS = [
    {"temperature": 0.7, "with_entropy": True},
    {"temperature": 1.3, "softcap": 2.0, "logit_scale": 0.5, "with_entropy": True, "chunk_size": 5},
    {"with_entropy": False},
]


def compare(split_over: int) -> list[float]:
    """Largest difference of values and gradients, relative to the largest of each."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias, seeds = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,), (2, TOKENS))
    )
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    shape = (dist.get_world_size() // split_over, split_over)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))["tensor"]
    labels = labels.roll(dist.get_rank() // split_over)  # each group of ranks has different tokens
    differences = []
    for options in OPTIONS:
        found = []
        for split in (False, True):
            leaves = [x.clone() for x in (hidden, weight, bias)]
            if split:
                leaves[1:] = [distribute_tensor(x, mesh, [Shard(0)]) for x in leaves[1:]]
            for leaf in leaves:
                leaf.requires_grad_()
            score = vocab_parallel_logprobs if split else chunked_logprobs
            values = [x for x in score(leaves[0], leaves[1], labels, bias=leaves[2], **options) if x is not None]
            sum((x * seed).sum() for x, seed in zip(values, seeds, strict=False)).backward()
            gradients = [x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad for x in leaves]
            found.append([*(x.detach() for x in values), *gradients])
        differences += [((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*found, strict=True)]
    return differences


@pytest.mark.parametrize(("world", "split_over"), [(2, 2), (4, 2)])
def test_values_and_gradients_are_those_of_the_whole_vocabulary(world: int, split_over: int) -> None:
    for differences in spawn(world, compare, split_over):
        assert max(differences) < 1e-12
