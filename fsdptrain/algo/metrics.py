"""What a loss reports of its tokens.

Metrics are divided by the loss tokens of the whole optimizer step: summed over packs and ranks they are means. Which
names are emitted depends on the configuration alone, so that every pack of every rank emits the same.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fsdptrain.algo.corrections import correction_ratio, mismatch, rejected
from fsdptrain.algo.kl import k3
from fsdptrain.algo.tokens import LossTokens, clamped
from fsdptrain.types import LossConfig, Metrics


def policy_metrics(
    tokens: LossTokens, *, ratio: Tensor, log_ratio: Tensor, clipped_low: Tensor, clipped_high: Tensor
) -> dict[str, Tensor]:
    """`ratio` is the one that the loss uses, `log_ratio` that of the tokens.

    Clipped is a token whose gradient the clip takes away (cispo: makes smaller): one on the side that its advantage
    pushes to.
    """
    return {
        "policy/ratio_mean": (tokens.shares * ratio).sum(),
        "policy/clip_fraction_low": (tokens.shares * clipped_low).sum(),
        "policy/clip_fraction_high": (tokens.shares * clipped_high).sum(),
        "policy/approx_kl": (tokens.shares * k3(-log_ratio)).sum(),  # KL(old || current): old made the tokens
    }


def mismatch_metrics(tokens: LossTokens, config: LossConfig) -> dict[str, Tensor]:
    """Trainer against engine on the same weights, w = exp(lo - lr); with `use_rollout_logprobs` l in place of lo.

    Out of bounds is a token whose w, or whose sequence's for a correction of sequences, lies outside of
    [mismatch_low, mismatch_high]; rejected is what --mismatch-rejection drops.
    """
    difference = mismatch(tokens, config)
    distance, log_w = difference.abs(), clamped(difference)
    w = log_w.exp()
    in_use = correction_ratio(tokens, config)
    outside = (in_use < config.mismatch_low) | (in_use > config.mismatch_high)
    metrics = {
        "mismatch/abs_mean": (tokens.shares * distance).sum(),
        "mismatch/abs_max": torch.where(tokens.shares > 0, distance, 0.0).max(),
        "mismatch/k3": (tokens.shares * k3(-log_w)).sum(),  # KL(rollout || trainer): the engine made the tokens
        "mismatch/out_of_bounds": (tokens.shares * outside).sum(),
        "mismatch/_w_mean": (tokens.shares * w).sum(),
        "mismatch/_w2_mean": (tokens.shares * w.square()).sum(),
    }
    if config.mismatch_rejection != "none":
        metrics["mismatch/rejected"] = (tokens.shares * rejected(tokens, config)).sum()
    return metrics


def finish_metrics(metrics: Mapping[str, float]) -> Metrics:
    """What to log, from metrics that were reduced over packs and ranks.

    A mean or a sum needs nothing; a value that is not linear in its tokens travels as the sums that it is made of,
    whose last part begins with `_`. They are taken out here: ess = (sum w)^2 / (n sum w^2), in (0, 1], 1 where engine
    and trainer agree.
    """
    finished = {name: value for name, value in metrics.items() if not name.rpartition("/")[2].startswith("_")}
    if "mismatch/_w_mean" in metrics:
        square_mean = metrics["mismatch/_w2_mean"]  # 0 where the step had no loss token
        finished["mismatch/ess"] = metrics["mismatch/_w_mean"] ** 2 / square_mean if square_mean > 0 else 1.0
    return finished
