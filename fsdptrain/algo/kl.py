"""Estimators of KL(policy || reference) from logprobs of tokens sampled from the policy.

From John Schulman, "Approximating KL divergence" (2020), with log_ratio = l - lf (current minus reference). The
expectation of each estimator is the KL or close to it. Do not use k1 as a loss: its gradient has expectation zero. Use
k2 or k3 instead.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def k1(log_ratio: Tensor) -> Tensor:
    """l - lf: unbiased, high variance, may be negative."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """(l - lf)^2 / 2: biased, low variance, never negative."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """exp(lf - l) - (lf - l) - 1: unbiased, low variance, never negative."""
    return torch.expm1(-log_ratio) + log_ratio


def low_var_kl(log_ratio: Tensor) -> Tensor:
    """k3 of l - lf clamped to +-20, then clamped to +-10: bounded, with zero gradient outside the bounds."""
    return k3(log_ratio.clamp(-20, 20)).clamp(-10, 10)


KL_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": low_var_kl}
