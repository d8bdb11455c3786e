"""Metrics of a step: statistics of the samples over all ranks, times, throughput, memory."""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist

from fsdptrain import platform
from fsdptrain.algo.advantages import zero_spread_groups
from fsdptrain.distributed import gather, sum_over_ranks
from fsdptrain.trainer.samples.source import RolloutBatch
from fsdptrain.types import Metrics

if TYPE_CHECKING:
    from fsdptrain.trainer.batches import StepBatches

_OF_TOKENS = ("policy/", "mismatch/")  # metrics that are means over the trained tokens of a step


def sample_metrics(rollout_batch: RolloutBatch, *, by_row: bool = False) -> Metrics:
    """Compute reward/*, group/*, completion/*, progress/* over all ranks.

    Unscored samples count only in lengths. Rewards are those that advantages use, after shaping; reward parts are
    reported without their weights. reward/unscored_fraction is the value that --max-unscored-fraction bounds; it
    includes samples that were generated but not kept.

    by_row: rows have different rewards, so each part is a mean over the samples that have it.
    """
    samples = rollout_batch.samples
    own = {name for sample in samples for name in sample.rewards}
    names = sorted({name for found in gather(own) for name in found})
    scored = [sample for sample in samples if sample.reward is not None]
    rewards = [sample.reward for sample in scored if sample.reward is not None]
    lengths = [sample.num_generated for sample in samples]
    equal, groups = zero_spread_groups(samples)
    total = reduce_sums(
        {
            "rewards": math.fsum(rewards),
            "squares": math.fsum(reward * reward for reward in rewards),
            "scored": len(rewards),
            "equal": equal,
            "groups": groups,
            "lengths": sum(lengths),
            "samples": len(samples),
            "truncated": sum(sample.is_cut for sample in samples),
            "dropped": rollout_batch.num_dropped,
            "unscored": rollout_batch.results.num_unscored if rollout_batch.results else 0,
            "made": len(rollout_batch.results.results) if rollout_batch.results else 0,
            "tokens": sum(len(s.token_ids) for sample in samples for s in sample.sequences),
            **{_reward(name): math.fsum(sample.rewards.get(name, 0.0) for sample in scored) for name in names},
            **{f"having {name}": sum(name in sample.rewards for sample in scored) for name in names if by_row},
        }
    )
    bounds = reduce_max({"longest": max(lengths, default=0), "minus_shortest": -min(lengths, default=math.inf)})
    num_samples = max(1.0, total["samples"])
    metrics = {
        "completion/length_mean": total["lengths"] / num_samples,
        "completion/length_min": -bounds["minus_shortest"] if bounds["longest"] else 0.0,
        "completion/length_max": bounds["longest"],
        "completion/truncated_fraction": total["truncated"] / num_samples,
        "progress/samples": total["samples"],
        "progress/tokens": total["tokens"],
        "progress/dropped": total["dropped"],
    }
    if rollout_batch.results is None:
        return metrics
    num_scored = max(1.0, total["scored"])
    mean = total["rewards"] / num_scored
    parts = {_reward(name): total[_reward(name)] / max(1.0, total.get(f"having {name}", num_scored)) for name in names}
    return {
        **metrics,
        **parts,  # before the metrics below: a reward part named `mean` must not replace the mean
        "reward/mean": mean,
        "reward/std": math.sqrt(max(0.0, total["squares"] / num_scored - mean * mean)),
        "reward/unscored_fraction": total["unscored"] / max(1.0, total["made"]),
        "group/zero_std_fraction": total["equal"] / max(1.0, total["groups"]),
    }


def reduce_sums(values: Mapping[str, float]) -> Metrics:
    """Sum each value over the ranks in one collective. Every rank passes the same names."""
    return dict(zip(values, sum_over_ranks(list(values.values())), strict=True))


def reduce_max(values: Mapping[str, float]) -> Metrics:
    """Take the maximum of each value over the ranks in one collective."""
    packed = torch.tensor(list(values.values()), dtype=torch.float64)
    dist.all_reduce(packed, op=dist.ReduceOp.MAX)
    return dict(zip(values, packed.tolist(), strict=True))


def packing_metrics(steps: "Sequence[StepBatches]") -> Metrics:
    count = max(1, len(steps))
    return {
        "perf/pack_fill": sum(step.fill for step in steps) / count,
        "perf/rank_imbalance": sum(step.imbalance for step in steps) / count,
        "perf/shared_tokens": sum(step.shared for step in steps) / count,
        "perf/skipped_tokens": sum(step.num_skipped for step in steps) / max(1, sum(step.num_tokens for step in steps)),
    }


def memory_metrics(*, planned: int | None) -> Metrics:
    """Return the peak memory over ranks, with the memory `planned` per rank. `planned` in [bytes], metrics in [GiB]."""
    expected = {} if planned is None else {"perf/planned_memory_gib": planned / platform.GIB}
    found = {"perf/host_rss_gib": psutil.Process().memory_info().rss / platform.GIB}
    if platform.has_accelerator():
        found["perf/peak_memory_gib"] = torch.accelerator.max_memory_allocated() / platform.GIB
    return expected | reduce_max(found)


def mean_metrics(steps: Sequence[Metrics], num_tokens: Sequence[int]) -> Metrics:
    """Combine the metrics of several optimizer steps into one record.

    Takes the maximum of `_max` metrics and of optim/skipped_steps, the last value of optim/lr, the mean over all
    trained tokens of policy/* and mismatch/*, and the mean over steps of all others. Only steps that have the metric
    count: a skipped step has no gradient norm.

    num_tokens: trained tokens of each step.
    """
    names = dict.fromkeys(name for step in steps for name in step)
    found = {}
    for name in names:
        having = [(step[name], count) for step, count in zip(steps, num_tokens, strict=True) if name in step]
        values = [value for value, _ in having]
        if name.endswith("_max") or name == "optim/skipped_steps":
            found[name] = max(values)
        elif name == "optim/lr":
            found[name] = values[-1]
        else:
            weights = [count if name.startswith(_OF_TOKENS) else 1 for _, count in having]
            found[name] = math.fsum(map(operator.mul, values, weights)) / sum(weights)
    return found


def _reward(name: str) -> str:
    return f"reward/{name}"
