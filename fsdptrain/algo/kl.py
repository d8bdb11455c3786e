"""Estimators of KL(policy || reference) from the logprobs of tokens that the policy sampled.

From John Schulman, "Approximating KL divergence" (2020), with log_ratio = l - lf (current minus reference). They
have the KL as their expectation or near it; as a loss, the gradient of k1 has expectation zero, so k2 or k3 is meant
there.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def k1(log_ratio: Tensor) -> Tensor:
    """l - lf: unbiased, of high variance, may be negative."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """(l - lf)^2 / 2: biased, of low variance, never negative."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """exp(lf - l) - (lf - l) - 1: unbiased, of low variance, never negative."""
    return torch.expm1(-log_ratio) + log_ratio


def low_var_kl(log_ratio: Tensor) -> Tensor:
    """k3 of l - lf clamped to +-20, itself clamped to +-10: bounded, and without gradient beyond a bound."""
    return k3(log_ratio.clamp(-20, 20)).clamp(-10, 10)


KL_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": low_var_kl}


def adapted(coef: float, kl: float, *, target: float, num_samples: int, horizon: int) -> float:
    """coef (1 + clip(kl / target - 1, -0.2, 0.2) num_samples / horizon): a proportional controller of the logarithm.

    Ziegler et al. 2019, arXiv 1909.08593, whose gain of 0.1 is num_samples / horizon here. `kl` was measured on
    `num_samples`; where it is not finite, as in a step that was skipped, nothing changes.
    """
    if not math.isfinite(kl):
        return coef
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / horizon)
