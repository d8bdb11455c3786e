"""Corrections leave agreement alone, are bounded, and stay finite however far engine and trainer are apart."""

import itertools
from dataclasses import replace

import pytest
import torch

from fsdptrain.algo.corrections import (
    CORRECTIONS,
    REJECTION_ESTIMATORS,
    REJECTION_LEVELS,
    correction_ratio,
    correction_weights,
)
from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.tokens import at_loss_tokens
from fsdptrain.algo.weights import count_totals
from fsdptrain.data.packing.pack import pack
from fsdptrain.types import LogProbs, LossConfig, PackedBatch, Sample

POLICY_LOSSES = sorted(set(LOSSES) - {"sft", "ipo"})
REJECTIONS = [f"{level}_{estimator}" for level in REJECTION_LEVELS for estimator in REJECTION_ESTIMATORS]
KINDS = [*sorted(CORRECTIONS), *REJECTIONS]


def config_of(kind: str) -> LossConfig:
    """A correction at its default bounds, or a rejection beside tis."""
    if kind not in CORRECTIONS:
        return replace(config_of("tis"), mismatch_rejection=kind, mismatch_rejection_max=0.05)
    correction = CORRECTIONS[kind]
    return LossConfig(mismatch_correction=kind, mismatch_low=correction.low, mismatch_high=correction.high)


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


def weights_of(log_w: list[list[float]], config: LossConfig) -> list[float]:
    return correction_weights(at_loss_tokens(*batch_of(log_w)), config).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_loss_is_untouched_where_engine_and_trainer_agree(name: str, kind: str) -> None:
    batch, logprobs = batch_of([[0.0] * 3, [0.0]])
    output = LOSSES[name](batch, logprobs, config_of(kind))
    plain = LOSSES[name](batch, logprobs, LossConfig())
    assert torch.equal(output.loss, plain.loss)
    assert output.metrics["mismatch/out_of_bounds"] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_loss_and_gradient_are_finite_for_log_ratios_of_200(name: str, kind: str) -> None:
    batch, logprobs = batch_of([[200.0, -200.0, 200.0], [-200.0, -200.0], [200.0]])
    output = LOSSES[name](batch, logprobs, config_of(kind))
    output.loss.backward()
    assert logprobs.values.grad is not None
    assert logprobs.values.grad.isfinite().all()
    assert all(value.isfinite() for value in output.metrics.values())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_bounded_and_need_no_gradient(kind: str) -> None:
    config = config_of(kind)
    for log_w in ([-200.0, 200.0, 0.3], [0.001, 0.002], [50.0], [-50.0]):
        weights = weights_of([log_w], config)
        assert all(w == 0 or config.mismatch_low <= w <= config.mismatch_high for w in weights)
        assert kind not in REJECTIONS or max(map(abs, log_w)) < 1 or 0 in weights
    batch, logprobs = batch_of([[0.5, 0.1]])
    on_policy = at_loss_tokens(replace(batch, old_logprobs=None), logprobs)
    assert not correction_ratio(on_policy, config).requires_grad


def test_weights_equal_their_formula() -> None:
    log_w = [[0.1, 0.9, -1.0], [0.004, 0.002]]
    e = torch.tensor([0.1, 0.9, -1.0, 0.004, 0.002], dtype=torch.float64).exp().tolist()
    total, mean = (torch.tensor([x], dtype=torch.float64).exp().item() for x in (0.006, 0.003))
    zero = torch.tensor([0.0], dtype=torch.float64).exp().item()
    expected = {  # rejections: below
        "none": [1.0] * 5,
        "tis": [e[0], 2.0, e[2], e[3], e[4]],
        "tis_sequence": [zero, zero, zero, total, total],
        "mis": [e[0], 0.0, 0.0, e[3], e[4]],
        "mis_sequence": [zero, zero, zero, mean, mean],
        "icepop": [e[0], e[1], 0.0, e[3], e[4]],
    }
    assert set(expected) == set(CORRECTIONS)
    for kind, weights in expected.items():
        assert weights_of(log_w, config_of(kind)) == pytest.approx(weights, rel=1e-6), kind


LOG_W = [[0.1, 0.9, -1.0], [0.2, -0.2], [0.1, 0.1, 0.1]]


@pytest.mark.parametrize(
    ("kind", "bound", "kept"),
    [
        ("token_k1", 0.5, [[1, 0, 0], [1, 1], [1, 1, 1]]),
        ("token_k2", 0.45, [[1, 1, 0], [1, 1], [1, 1, 1]]),  # 0.9^2 / 2 = 0.405
        ("token_k3", 0.4, [[1, 0, 1], [1, 1], [1, 1, 1]]),  # e^0.9 - 1.9 = 0.56; e^-1 - 1 + 1 = 0.37
        ("seq_mean_k1", 0.05, [[1, 1, 1], [1, 1], [0, 0, 0]]),  # means 0, 0, 0.1: signs cancel
        ("seq_mean_k2", 0.01, [[0, 0, 0], [0, 0], [1, 1, 1]]),  # 0.3, 0.02, 0.005
        ("seq_mean_k3", 0.03, [[0, 0, 0], [1, 1], [1, 1, 1]]),
        ("seq_max_k1", 0.15, [[0, 0, 0], [0, 0], [1, 1, 1]]),
        ("seq_max_k2", 0.1, [[0, 0, 0], [1, 1], [1, 1, 1]]),
        ("seq_max_k3", 0.5, [[0, 0, 0], [1, 1], [1, 1, 1]]),
        ("seq_sum_k1", 0.2, [[1, 1, 1], [1, 1], [0, 0, 0]]),
        ("seq_sum_k2", 0.016, [[0, 0, 0], [0, 0], [1, 1, 1]]),
        ("seq_sum_k3", 0.05, [[0, 0, 0], [1, 1], [1, 1, 1]]),
    ],
)
def test_a_rejection_drops_what_its_statistic_says_and_leaves_the_weight_of_the_rest(
    kind: str, bound: float, kept: list[list[int]]
) -> None:
    config = replace(config_of("tis"), mismatch_rejection=kind, mismatch_rejection_max=bound)
    plain = weights_of(LOG_W, config_of("tis"))
    assert weights_of(LOG_W, config) == [w * k for w, k in zip(plain, itertools.chain(*kept), strict=True)]
    share = LOSSES["grpo"](*batch_of(LOG_W), config).metrics["mismatch/rejected"].item()
    assert share == pytest.approx(1 - sum(map(sum, kept)) / 8)


def test_without_old_logprobs_of_the_trainer_the_present_policy_is_compared_with_the_engine() -> None:
    """--use-rollout-logprobs: lo is lr, and their difference says nothing."""
    batch, logprobs = batch_of([[0.4, 0.0], [0.0]])
    bypass = replace(batch, old_logprobs=batch.rollout_logprobs)
    config = LossConfig(use_rollout_logprobs=True, mismatch_rejection="token_k1", mismatch_rejection_max=0.2)
    output = LOSSES["reinforce"](bypass, logprobs, config)
    assert output.metrics["mismatch/rejected"].item() == pytest.approx(1 / 3)  # l - lr is 0.3, -0.1, -0.1
    assert output.metrics["mismatch/abs_mean"].item() == pytest.approx((0.3 + 0.1 + 0.1) / 3)
    output.loss.backward()
    assert logprobs.values.grad is not None
    assert logprobs.values.grad[:2].tolist() == pytest.approx([0.0, -1.5 / 3])


@pytest.mark.parametrize(
    ("kind", "share"), [("none", 2 / 5), ("tis", 1 / 5), ("icepop", 1 / 5), ("mis_sequence", 0.0), ("tis_sequence", 0)]
)
def test_out_of_bounds_is_counted_by_the_bounds_in_use(kind: str, share: float) -> None:
    batch, logprobs = batch_of([[0.1, 0.9, -1.0], [0.004, 0.002]])
    metrics = LOSSES["grpo"](batch, logprobs, config_of(kind)).metrics
    assert metrics["mismatch/out_of_bounds"].item() == pytest.approx(share)


def test_a_rejected_token_still_counts_in_the_denominator() -> None:
    batch, logprobs = batch_of([[5.0, 0.0]])
    kept = LOSSES["reinforce"](batch, logprobs, config_of("mis"))
    assert kept.loss.item() == pytest.approx(0.5 * 1.5 * 1.1)  # one of two tokens, each of weight 1/2


def test_kl_and_entropy_are_not_weighted() -> None:
    batch, logprobs = batch_of([[5.0, 5.0]])
    batch = replace(batch, ref_logprobs=torch.full((batch.num_tokens,), -2.0, dtype=torch.float64))
    config = replace(config_of("mis"), kl_loss_coef=1.0, kl_loss_type="k2")
    metrics = LOSSES["grpo"](batch, LogProbs(logprobs.values, torch.ones(3)), replace(config, entropy_coef=1.0)).metrics
    assert metrics["loss/policy"] == 0
    assert metrics["loss/kl"].item() == pytest.approx(0.9**2 / 2)
    assert metrics["loss/entropy"].item() == pytest.approx(-1.0)


def test_opsm_counts_what_it_drops() -> None:
    batch, logprobs = batch_of([[0.0] * 3, [0.0]])  # the policy fell by 0.1 everywhere; the second has A < 0
    for delta, share in ((0.05, 1 / 4), (0.15, 0.0)):
        metrics = LOSSES["gspo"](batch, logprobs, LossConfig(use_opsm=True, opsm_delta=delta)).metrics
        assert metrics["policy/opsm_fraction"].item() == pytest.approx(share)
