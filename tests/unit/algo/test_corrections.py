"""Metrics and denominators of corrections, and estimators of the KL divergence.

Their weights: tests/properties/test_loss_formulas.py.
"""

from dataclasses import replace

import pytest
import torch

from fsdptrain.algo.kl import KL_ESTIMATORS
from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.weights import count_totals
from fsdptrain.data.packing.pack import pack
from fsdptrain.types import LogProbs, LossConfig, PackedBatch, Sample


def batch_of(log_w: list[list[float]]) -> tuple[PackedBatch, LogProbs]:
    """One sequence for each list; trainer - engine is `log_w` at its tokens."""
    made = [
        Sample("g", [0] * (len(row) + 1), [False] + [True] * len(row), [0.0] + [-1.0 - x for x in row], advantage=a)
        for row, a in zip(log_w, (1.5, -0.5, 0.25), strict=False)
    ]
    totals = count_totals([len(row) for row in log_w])
    batch = pack(made, aggregation="token_mean", totals=totals, max_response_len=9)
    old = torch.full((batch.num_tokens,), -1.0, dtype=torch.float64)
    batch = replace(batch, old_logprobs=old, rollout_logprobs=batch.rollout_logprobs.double())
    return batch, LogProbs((old - 0.1).requires_grad_())


def test_use_rollout_logprobs_compares_the_current_policy_with_the_engine() -> None:
    batch, logprobs = batch_of([[0.4, 0.0], [0.0]])
    bypass = replace(batch, old_logprobs=batch.rollout_logprobs)
    metrics = LOSSES["reinforce"](bypass, logprobs, LossConfig(use_rollout_logprobs=True)).metrics
    assert metrics["mismatch/abs_mean"].item() == pytest.approx((0.3 + 0.1 + 0.1) / 3)  # l - lr is 0.3, -0.1, -0.1


@pytest.mark.parametrize(
    ("kind", "share"), [("none", 2 / 5), ("tis", 1 / 5), ("icepop", 1 / 5), ("mis_sequence", 0.0), ("tis_sequence", 0)]
)
def test_out_of_bounds_counts_by_the_bounds_of_the_correction(kind: str, share: float) -> None:
    batch, logprobs = batch_of([[0.1, 0.9, -1.0], [0.004, 0.002]])
    metrics = LOSSES["grpo"](batch, logprobs, LossConfig(mismatch_correction=kind)).metrics
    assert metrics["mismatch/out_of_bounds"].item() == pytest.approx(share)


def test_opsm_fraction_is_the_share_of_dropped_tokens() -> None:
    batch, logprobs = batch_of([[0.0] * 3, [0.0]])  # the policy fell by 0.1 everywhere; the second has A < 0
    for delta, share in ((0.05, 1 / 4), (0.15, 0.0)):
        metrics = LOSSES["gspo"](batch, logprobs, LossConfig(use_opsm=True, opsm_delta=delta)).metrics
        assert metrics["policy/opsm_fraction"].item() == pytest.approx(share)


def test_low_var_kl_has_no_gradient_beyond_its_bounds() -> None:
    """Not NaN either, where exp overflows."""
    log_ratio = torch.tensor([-1e4, -200.0, 200.0, 1e4], dtype=torch.float64, requires_grad=True)
    KL_ESTIMATORS["low_var_kl"](log_ratio).sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.eq(0).all()


def test_k3_keeps_its_digits_near_zero() -> None:
    """exp(x) - 1 - x cancels in float32 where x is small; expm1 does not."""
    log_ratio = torch.tensor([1e-3, -1e-3])
    expected = torch.expm1(-log_ratio.double()) + log_ratio.double()
    torch.testing.assert_close(KL_ESTIMATORS["k3"](log_ratio).double(), expected, rtol=5e-4, atol=0)
