"""The KL divergence to the reference as a term of the reward."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptrain.algo.kl import KL_ESTIMATORS
from fsdptrain.trainer.batches import StepBatches
from fsdptrain.trainer.logprobs import regrouped
from fsdptrain.types import Metrics, PackedBatch, Sample


def kl_in_reward(
    samples: Sequence[Sample],
    steps: Sequence[StepBatches],
    *,
    coef: float,
    estimator: str,
    advantages: Callable[[list[Sample]], list[Sample]],
) -> tuple[list[StepBatches], Metrics]:
    """Subtract the KL term from the rewards and recompute the advantages in the packs.

    The reward becomes reward - coef * sum_t kl_t over the loss tokens of each sample. kl_t estimates KL(old policy ||
    reference) and has no gradient (RLHF, arXiv 1909.08593).

    The packs of a sample may be on any rank, while its group is on the rank that generated it. One all_reduce sends the
    sums to the owners and one returns the advantages; each has one number per sample of all ranks.

    Args:
        samples: the samples that this rank passed to `make_batches`: whole groups, except for samples too long for a
            pack.
        steps: steps with old and reference logprobs.
        advantages: computes advantages from rewards, including whitening. Collective.
    """
    index = steps[0].index
    sums = _of_each_sample(steps, estimator, len(index.lengths))
    own = index.of_rank(dist.get_rank())
    penalized = [
        replace(sample, reward=None if sample.reward is None else sample.reward - coef * kl)
        for sample, kl in zip(samples, sums[own.start : own.stop].tolist(), strict=True)
    ]
    values = torch.zeros_like(sums)
    values[own.start : own.stop] = torch.tensor([s.advantage for s in advantages(penalized)], dtype=values.dtype)
    dist.all_reduce(values)
    packs = [_with_advantages(pack, values[list(members)]) for pack, members in _packs(steps)]
    mean = sums.mean().item()
    per_token = sums.sum().item() / max(1, sum(index.loss_tokens))
    return regrouped(steps, packs), {"reward/kl": -coef * mean, "kl/reward_mean": mean, "policy/ref_kl": per_token}


def _of_each_sample(steps: Sequence[StepBatches], estimator: str, count: int) -> Tensor:
    """Return the sum of kl_t for each sample of all ranks, by global index. [count] f64

    A sample in several packs counts once.
    """
    sums = torch.zeros(2, count, dtype=torch.float64)  # sums, and the number of packs that hold the sample
    for pack, members in _packs(steps):
        assert pack.old_logprobs is not None
        assert pack.ref_logprobs is not None
        log_ratio = pack.old_logprobs.double() - pack.ref_logprobs.double()
        kl = torch.where(pack.loss_mask, KL_ESTIMATORS[estimator](log_ratio), 0.0)
        for member, part in zip(members, kl.split(pack.seqlens), strict=False):  # an empty pack has one segment
            sums[:, member] += torch.stack([part.sum(), torch.ones_like(part.sum())])
    dist.all_reduce(sums)
    return sums[0] / sums[1].clamp(min=1)


def _with_advantages(pack: PackedBatch, values: Tensor) -> PackedBatch:
    """Set the advantages of `pack` to `values` [N], one per sequence, at its loss tokens.

    Uses the layout of `data.packing.pack`.
    """
    if not len(values):
        return pack
    per_token = values.float().repeat_interleave(torch.tensor(pack.seqlens))
    return replace(pack, advantages=per_token * pack.loss_mask)


def _packs(steps: Sequence[StepBatches]) -> Iterator[tuple[PackedBatch, Sequence[int]]]:
    """Iterate over the packs of this rank, each with the global indices of its samples."""
    for step in steps:
        yield from zip(step.packs, step.members[dist.get_rank()], strict=True)
