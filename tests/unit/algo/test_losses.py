"""Metrics of losses, losses of empty packs, and weights of tokens.

Values and gradients: tests/properties/test_loss_formulas.py.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fsdptrain.algo.corrections import CORRECTIONS
from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.metrics import finish_metrics
from fsdptrain.algo.weights import Totals, count_totals, num_loss_tokens, token_weight
from fsdptrain.config.presets import LOSS_OPTIONS
from fsdptrain.data.packing.pack import empty_pack, pack
from fsdptrain.types import LogProbs, LossConfig, PackedBatch, Sample


def make_batch(seed: int = 0) -> tuple[PackedBatch, LogProbs]:
    """Three samples whose logprobs differ enough to be clipped; NaN at positions without a loss."""
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

    values = numbers(0.5).requires_grad_()
    batch = replace(batch, old_logprobs=numbers(0.3), ref_logprobs=numbers(0.5))
    return batch, LogProbs(values, numbers(0.2).abs())


def test_metrics_are_means_over_the_loss_tokens_of_the_step() -> None:
    batch, logprobs = make_batch(3)
    assert batch.old_logprobs is not None
    at, n = batch.loss_positions, 40
    metrics = LOSSES["grpo"](batch, logprobs, LossConfig()).metrics
    old, new, rollout = (
        x[at].detach().double().numpy() for x in (batch.old_logprobs, logprobs.values, batch.rollout_logprobs)
    )
    ratio, w = np.exp(new - old), np.exp(old - rollout)
    expected = {
        "policy/ratio_mean": ratio.sum() / n,
        "policy/approx_kl": (ratio - 1 - (new - old)).sum() / n,
        "mismatch/abs_mean": np.abs(old - rollout).sum() / n,
        "mismatch/abs_max": np.abs(old - rollout).max(),
        "mismatch/k3": (w - 1 - (old - rollout)).sum() / n,
        "mismatch/out_of_bounds": ((w < 0.5) | (w > 2)).sum() / n,
    }
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-6, abs=1e-9), name
        assert not metrics[name].requires_grad
    scale = len(at) / n  # the rest of the step counts as w = 0
    ess = finish_metrics({name: value.item() for name, value in metrics.items()}, num_tokens=1)["mismatch/ess"]
    assert ess == pytest.approx(scale * w.sum() ** 2 / (len(at) * (w**2).sum()), rel=1e-6)


def test_effective_sample_size_is_1_if_engine_and_trainer_agree() -> None:
    batch, logprobs = make_batch()
    batch = replace(batch, old_logprobs=batch.rollout_logprobs.double(), num_loss_tokens=len(batch.loss_positions))
    metrics = LOSSES["grpo"](batch, logprobs, LossConfig()).metrics
    finished = finish_metrics({name: value.item() for name, value in metrics.items()}, num_tokens=1)
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


def test_a_step_without_any_loss_token_has_a_loss_of_0_and_no_means() -> None:
    output = LOSSES["grpo"](empty_pack(count_totals([0])), LogProbs(torch.zeros(1, requires_grad=True)), LossConfig())
    values = {name: value.item() for name, value in output.metrics.items()}
    assert finish_metrics(values, num_tokens=0) == {"loss/total": 0, "loss/policy": 0}


@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_that_skip_samples_of_advantage_0_have_no_gradient_there(name: str, correction: str) -> None:
    batch, logprobs = make_batch()
    values = logprobs.values.detach().clone().requires_grad_()
    config = LossConfig(eps_clip_c=3.0, use_opsm=True, mismatch_correction=correction)
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages), ref_logprobs=None)
    output = LOSSES[name](batch, LogProbs(values), config)
    output.loss.backward()
    assert values.grad is not None
    assert bool(values.grad.any() or output.loss) is not LOSS_OPTIONS[name].idle_at_zero_advantage


def test_sft_has_no_mismatch_metrics() -> None:
    batch, logprobs = make_batch()
    output = LOSSES["sft"](replace(batch, ref_logprobs=None), LogProbs(logprobs.values), LossConfig())
    assert not any(name.startswith("mismatch/") for name in output.metrics)


@pytest.mark.parametrize(
    ("aggregation", "weight"),
    [("token_mean", 1 / 30), ("sequence_mean", 1 / (4 * 5)), ("fixed_length", 1 / (4 * 100)), ("sequence_sum", 1 / 4)],
)
def test_weights_of_aggregations(aggregation: str, weight: float) -> None:
    totals = Totals(num_tokens=30, num_sequences=4)
    assert token_weight(aggregation, loss_tokens=5, totals=totals, max_response_len=100) == weight


def test_totals_count_sequences_that_have_a_loss() -> None:
    assert count_totals([5, 0, 7]) == Totals(num_tokens=12, num_sequences=2)


def test_the_first_token_is_never_a_loss_token() -> None:
    assert num_loss_tokens(Sample("g", [1, 2, 3], [True, True, False], [0.0] * 3)) == 1
