"""Losses against references that are written token by token from the formulas, in float64."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.metrics import finish_metrics
from fsdptrain.algo.weights import count_totals, num_loss_tokens
from fsdptrain.data.packing.pack import empty_pack, pack
from fsdptrain.types import LogProbs, LossConfig, PackedBatch, Sample

CONFIGS = {
    "plain": LossConfig(),
    "asymmetric": LossConfig(eps_clip=0.1, eps_clip_high=0.4),
    "dual": LossConfig(eps_clip_c=1.5),
    **{f"kl_{kind}": LossConfig(kl_loss_coef=0.3, kl_loss_type=kind) for kind in ("k1", "k2", "k3")},
    "entropy": LossConfig(entropy_coef=0.2),
}


def make_batch(seed: int = 0, *, on_policy: bool = False) -> tuple[PackedBatch, LogProbs]:
    """Three samples of random numbers, far enough apart for every clip to act; poison where there is no loss."""
    rng = np.random.default_rng(seed)
    samples = []
    for length in (9, 2, 14):
        mask = [False, *(rng.random(length - 1) < 0.6).tolist()]
        logprobs = np.where(mask, -rng.exponential(size=length), 0.0).tolist()
        samples.append(Sample("g", [0] * length, mask, logprobs, advantage=float(rng.normal())))
    totals = replace(count_totals([num_loss_tokens(s) for s in samples]), num_tokens=40)  # other packs hold the rest
    batch = pack(samples, aggregation="token_mean", totals=totals, max_response_len=16)

    def numbers(scale: float) -> Tensor:
        values = torch.from_numpy(rng.normal(scale=scale, size=batch.num_tokens))
        return torch.where(batch.loss_mask, batch.rollout_logprobs + values, torch.nan)

    old = None if on_policy else numbers(0.3)
    values = numbers(0.5).requires_grad_()
    batch = replace(batch, old_logprobs=old, ref_logprobs=numbers(0.5))
    return batch, LogProbs(values, numbers(0.2).abs())


def reference(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> dict[str, float]:
    assert batch.ref_logprobs is not None
    assert logprobs.entropy is not None
    policy = kl = entropy = 0.0
    for t in range(batch.num_tokens):
        if not batch.loss_mask[t]:
            continue
        a, w, lp = batch.advantages[t].item(), batch.loss_weights[t].item(), logprobs.values[t].item()
        lo = lp if batch.old_logprobs is None else batch.old_logprobs[t].item()
        r, d = math.exp(lp - lo), batch.ref_logprobs[t].item() - lp
        loss = -min(r * a, min(max(r, 1 - config.eps_clip), 1 + config.eps_clip_high) * a)
        if config.eps_clip_c is not None and a < 0:
            loss = min(loss, -config.eps_clip_c * a)
        policy += w * loss
        kl += w * {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[config.kl_loss_type]
        entropy += w * logprobs.entropy[t].item()
    terms = {
        "loss/policy": policy,
        "loss/kl": config.kl_loss_coef * kl,
        "loss/entropy": -config.entropy_coef * entropy,
    }
    return {**terms, "loss/total": sum(terms.values())}


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_grpo_equals_its_formula(config: LossConfig, on_policy: bool) -> None:
    for seed in range(5):
        batch, logprobs = make_batch(seed, on_policy=on_policy)
        output = LOSSES["grpo"](batch, logprobs, config)
        assert output.loss.item() == output.metrics["loss/total"].item()
        for name, value in reference(batch, logprobs, config).items():
            assert output.metrics[name].item() == pytest.approx(value, rel=1e-6, abs=1e-9), name  # weights are float32


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_grpo_has_the_gradient_of_its_formula(config: LossConfig) -> None:
    """By central differences of the reference; a kink between the two points would show, and none is hit."""
    batch, logprobs = make_batch()
    LOSSES["grpo"](batch, logprobs, config).loss.backward()
    assert logprobs.values.grad is not None
    for t in range(batch.num_tokens):
        if not batch.loss_mask[t]:
            assert logprobs.values.grad[t] == 0
            continue
        high, low = (shifted(batch, logprobs, config, t, step) for step in (1e-6, -1e-6))
        assert logprobs.values.grad[t].item() == pytest.approx((high - low) / 2e-6, rel=1e-4, abs=1e-8)


def shifted(batch: PackedBatch, logprobs: LogProbs, config: LossConfig, t: int, step: float) -> float:
    values = logprobs.values.detach().clone()
    values[t] += step
    return reference(batch, LogProbs(values, logprobs.entropy), config)["loss/total"]


def test_on_policy_gradient_is_the_plain_policy_gradient() -> None:
    """With r = 1 no clip acts: d loss / d l = -w A."""
    batch, logprobs = make_batch(on_policy=True)
    batch = replace(batch, ref_logprobs=None)
    LOSSES["grpo"](batch, LogProbs(logprobs.values), LossConfig(eps_clip_c=3.0)).loss.backward()
    torch.testing.assert_close(logprobs.values.grad, (-batch.loss_weights * batch.advantages).double())


def test_sft_is_the_mean_negative_log_likelihood() -> None:
    batch, logprobs = make_batch()
    batch = replace(batch, ref_logprobs=None)
    output = LOSSES["sft"](batch, LogProbs(logprobs.values), LossConfig())
    at = batch.loss_positions
    torch.testing.assert_close(output.loss, -logprobs.values[at].sum() / 40, rtol=1e-6, atol=0)
    assert not any(name.startswith("mismatch/") for name in output.metrics)


def test_metrics_are_means_over_the_loss_tokens_of_the_step() -> None:
    batch, logprobs = make_batch(3)
    assert batch.old_logprobs is not None
    at, n = batch.loss_positions, 40
    metrics = LOSSES["grpo"](batch, logprobs, LossConfig()).metrics
    old, new, rollout = (
        x[at].detach().double().numpy() for x in (batch.old_logprobs, logprobs.values, batch.rollout_logprobs)
    )
    advantages = batch.advantages[at].numpy()
    ratio, w = np.exp(new - old), np.exp(old - rollout)
    expected = {
        "policy/ratio_mean": ratio.sum() / n,
        "policy/clip_fraction_low": ((ratio < 0.8) & (advantages < 0)).sum() / n,
        "policy/clip_fraction_high": ((ratio > 1.2) & (advantages > 0)).sum() / n,
        "policy/approx_kl": (ratio - 1 - (new - old)).sum() / n,
        "mismatch/abs_mean": np.abs(old - rollout).sum() / n,
        "mismatch/abs_max": np.abs(old - rollout).max(),
        "mismatch/k3": (w - 1 - (old - rollout)).sum() / n,
        "mismatch/out_of_bounds": ((w < 0.5) | (w > 2)).sum() / n,
    }
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-6, abs=1e-9), name
        assert not metrics[name].requires_grad
    assert expected["policy/clip_fraction_low"] > 0
    assert expected["policy/clip_fraction_high"] > 0
    scale = (
        len(at) / n
    )  # this pack holds so much of the step: with the rest at w = 0, ess would be that share of its own
    ess = finish_metrics({name: value.item() for name, value in metrics.items()})["mismatch/ess"]
    assert ess == pytest.approx(scale * w.sum() ** 2 / (len(at) * (w**2).sum()), rel=1e-6)


def test_effective_sample_size_is_one_where_engine_and_trainer_agree() -> None:
    batch, logprobs = make_batch()
    batch = replace(batch, old_logprobs=batch.rollout_logprobs.double(), num_loss_tokens=len(batch.loss_positions))
    metrics = LOSSES["grpo"](batch, logprobs, LossConfig()).metrics
    finished = finish_metrics({name: value.item() for name, value in metrics.items()})
    assert finished["mismatch/ess"] == pytest.approx(1.0)
    assert not any("/_" in name for name in finished)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_an_empty_pack_emits_the_same_metrics_and_a_zero_gradient(name: str) -> None:
    full, logprobs = make_batch()
    empty = replace(empty_pack(count_totals([5])), old_logprobs=torch.zeros(1), ref_logprobs=torch.zeros(1))
    values = torch.tensor([-7.0], requires_grad=True)
    output = LOSSES[name](empty, LogProbs(values, torch.tensor([3.0])), LossConfig(kl_loss_coef=1.0, entropy_coef=1.0))
    output.loss.backward()
    assert values.grad is not None
    assert values.grad.item() == 0
    assert output.metrics.keys() == LOSSES[name](full, logprobs, LossConfig()).metrics.keys()
    assert all(value.item() == 0 for value in output.metrics.values())


def test_a_step_without_any_loss_token_has_finite_metrics() -> None:
    output = LOSSES["grpo"](empty_pack(count_totals([0])), LogProbs(torch.zeros(1, requires_grad=True)), LossConfig())
    finished = finish_metrics({name: value.item() for name, value in output.metrics.items()})
    assert all(math.isfinite(value) for value in finished.values())


def test_a_ratio_beyond_every_bound_stays_finite() -> None:
    batch, logprobs = make_batch()
    far = LogProbs((logprobs.values.detach() + 500).requires_grad_(), None)
    output = LOSSES["grpo"](replace(batch, ref_logprobs=None), far, LossConfig())
    output.loss.backward()
    assert far.values.grad is not None
    assert all(value.isfinite() for value in [output.loss, far.values.grad.sum(), *output.metrics.values()])
