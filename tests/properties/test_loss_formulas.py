"""Every loss has the value and the gradient of its formula (loss_references.py)."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdptrain.algo import weighted_losses
from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.weights import AGGREGATIONS, count_totals, num_loss_tokens
from fsdptrain.config.presets import LOSS_FIELDS, LOSS_OPTIONS
from fsdptrain.data.packing.pack import pack
from fsdptrain.types import LogProbs, LossConfig, PackedBatch, Sample
from tests.properties.loss_references import Sequence, loss_of
from tests.properties.strategies import sample_lists

CONFIGS = [
    LossConfig(),
    LossConfig(eps_clip=0.02, eps_clip_high=0.05, is_cap_high=1.1, sapo_tau_pos=2.0),
    LossConfig(eps_clip=0.01, eps_clip_high=0.3, eps_clip_c=1.2, is_cap_high=20.0, sapo_tau_neg=3.0),
    LossConfig(use_opsm=True, opsm_delta=0.01, mismatch_correction="tis", mismatch_low=0.0),
    LossConfig(mismatch_correction="tis_sequence", mismatch_low=0.2, mismatch_high=1.5),
    LossConfig(mismatch_correction="mis", mismatch_low=0.9, mismatch_high=1.1, use_opsm=True),
    LossConfig(mismatch_correction="mis_sequence", mismatch_low=0.9, mismatch_high=1.1),
    LossConfig(mismatch_correction="icepop", mismatch_high=5.0, kl_loss_coef=0.3, kl_loss_type="low_var_kl"),
    LossConfig(kl_loss_coef=0.3, kl_loss_type="k2", use_unbiased_kl=True),
    LossConfig(kl_loss_coef=0.3, kl_loss_type="k1", use_unbiased_kl=True),
    LossConfig(mismatch_correction="mis", kl_loss_coef=0.3, kl_loss_type="k3", entropy_coef=0.2),
    LossConfig(mismatch_high=1.5, use_rollout_logprobs=True),
]
SPREADS = [0.0, 0.02, 0.3, 3.0, 200.0]  # how far old, rollout and reference logprobs lie from the current ones


PUSHING = [
    Sample("up", [0] * 5, [False, True, False, True, True], [0.0] * 5, advantage=1.3),
    Sample("down", [0] * 5, [False, True, True, True, True], [0.0] * 5, advantage=-1.3),
    Sample("one token", [0] * 2, [False, True], [0.0] * 2, advantage=-0.4),
]  # beside whatever is drawn, so that each batch pushes both ways


def make_batch(samples: list[Sample], aggregation: str, *, spread: float, seed: int) -> tuple[PackedBatch, LogProbs]:
    """Float64 logprobs of `samples`, at most 0; NaN wherever there is no loss."""
    totals = count_totals([num_loss_tokens(sample) for sample in samples])
    batch = pack(samples, aggregation=aggregation, totals=totals, max_response_len=24)
    generator = torch.Generator().manual_seed(seed)

    def near(base: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64)
        return -(base - spread * noise).abs()

    base = torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64).exp().neg()
    poison = torch.where(batch.loss_mask, 0.0, torch.nan)
    if not batch.loss_mask.any():
        poison = torch.zeros_like(poison)  # an empty pack looks at its first position, with weight 0
    batch = replace(
        batch, old_logprobs=near(base) + poison, ref_logprobs=near(base) + poison,
        rollout_logprobs=near(base) + poison, advantages=batch.advantages.double(),
        loss_weights=batch.loss_weights.double(),
    )  # fmt: skip
    values = (base + poison).requires_grad_()
    return batch, LogProbs(values, entropy_of(values))


def entropy_of(values: torch.Tensor) -> torch.Tensor:
    """Linear, so that its gradient is finite where a value is NaN."""
    return -0.3 * values


def sequences_of(batch: PackedBatch, values: torch.Tensor) -> list[Sequence]:
    found = []
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False):
        at = [t for t in range(start, end) if batch.loss_mask[t]]
        if at:
            assert batch.old_logprobs is not None
            assert batch.ref_logprobs is not None
            columns = (
                values, batch.old_logprobs, batch.rollout_logprobs, batch.ref_logprobs, batch.loss_weights,
                entropy_of(values),
            )  # fmt: skip
            found.append(Sequence(*(column[at] for column in columns), A=batch.advantages[at[0]].item()))
    return found


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("name", sorted(LOSSES))
@settings(max_examples=25)
@given(
    samples=sample_lists(max_size=5).map(lambda drawn: [*drawn, *PUSHING]),
    config=st.sampled_from(CONFIGS),
    aggregation=st.sampled_from(sorted(AGGREGATIONS)),
    on_policy=st.sampled_from([False, False, True]),
    seed=st.integers(0, 1000),
)
def test_value_and_gradient_are_those_of_the_formula(name, samples, config, aggregation, on_policy, spread, seed):
    batch, logprobs = make_batch(samples, aggregation, spread=spread, seed=seed)
    if not config.kl_loss_coef:
        batch = replace(batch, ref_logprobs=None)
    if on_policy:
        batch = replace(batch, old_logprobs=None)
    output = LOSSES[name](batch, logprobs, config)
    output.loss.backward()
    assert all(value.isfinite() for value in output.metrics.values())
    terms = [value for key, value in output.metrics.items() if key in ("loss/policy", "loss/kl", "loss/entropy")]
    torch.testing.assert_close(sum(terms), output.loss, rtol=1e-12, atol=1e-12)
    assert output.metrics["loss/total"] == output.loss
    assert logprobs.values.grad is not None

    values = logprobs.values.detach().clone().requires_grad_()
    if batch.ref_logprobs is None:
        batch = replace(batch, ref_logprobs=values.detach())
    if batch.old_logprobs is None:
        batch = replace(batch, old_logprobs=values.detach())
    expected = loss_of(name, sequences_of(batch, values), config)
    if expected.requires_grad:
        expected.backward()
    gradient = torch.zeros_like(values) if values.grad is None else values.grad
    scale = max(1.0, float(gradient.abs().max()), abs(expected.item()))
    torch.testing.assert_close(output.loss, expected, rtol=1e-9, atol=1e-10 * scale, check_dtype=False)
    torch.testing.assert_close(logprobs.values.grad, gradient, rtol=1e-9, atol=1e-10 * scale)


def with_values(config: LossConfig, **values: object) -> LossConfig:
    return config.model_copy(update=values)


BUSY = LossConfig(eps_clip=0.1, eps_clip_high=0.1, eps_clip_c=1.3, is_cap_high=1.2, use_opsm=True, opsm_delta=0.2,
                  mismatch_correction="tis")  # fmt: skip
BASES = [BUSY, with_values(BUSY, eps_clip=0.4, eps_clip_high=0.4, opsm_delta=0.01)]
OTHER = {"eps_clip": 0.001, "eps_clip_high": 0.001, "eps_clip_c": None, "is_cap_high": 1.5, "sapo_tau_pos": 2.0,
         "sapo_tau_neg": 2.0, "use_opsm": False, "opsm_delta": 0.02,
         "mismatch_correction": "none",
         "mismatch_low": 0.95, "mismatch_high": 1.1}  # fmt: skip


def gradient_of(name: str, config: LossConfig, **other: object) -> torch.Tensor:
    mask, advantages = [False, True, True], torch.linspace(-2, 2, 40).tolist()
    made = [Sample("g", [0] * 3, mask, [0.0] * 3, advantage=a) for a in advantages]
    batch, logprobs = make_batch(made, "token_mean", spread=0.3, seed=1)
    if "use_rollout_logprobs" in other:
        batch = replace(batch, old_logprobs=batch.rollout_logprobs)
    if "on_policy" in other:
        batch = replace(batch, old_logprobs=None)
    LOSSES[name](replace(batch, ref_logprobs=None), logprobs, config).loss.backward()
    assert logprobs.values.grad is not None
    return logprobs.values.grad


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("field", LOSS_FIELDS)
def test_an_option_changes_the_gradient_where_the_table_says_that_the_loss_reads_it(name: str, field: str) -> None:
    other = {"use_rollout_logprobs": True} if field == "use_rollout_logprobs" else {}
    changed = False
    for base in BASES:
        config = with_values(base, **(other or {field: OTHER[field]}))
        changed |= not torch.equal(gradient_of(name, base), gradient_of(name, config, **other))
    assert changed is (field in LOSS_OPTIONS[name].reads)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_an_option_that_is_refused_on_policy_has_no_effect_there(name: str) -> None:
    before = gradient_of(name, BUSY, on_policy=True)
    for field in LOSS_OPTIONS[name].reads - {"use_rollout_logprobs"}:
        after = gradient_of(name, with_values(BUSY, **{field: OTHER[field]}), on_policy=True)
        idle = field in LOSS_OPTIONS[name].idle_on_policy
        assert torch.allclose(before, after, rtol=1e-12, atol=0, equal_nan=True) is idle, field


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "prime_rl"])
def test_the_clip_metrics_count_the_tokens_whose_gradient_the_clip_removes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cispo only reduces them. A token without advantage has no gradient that a clip could remove."""
    monkeypatch.setattr(weighted_losses, "PRIME_RL_KL_COEF", 0.0)
    mask, advantages = [False, True, True], torch.linspace(-2, 2, 41).tolist()
    made = [Sample("g", [0] * 3, mask, [0.0] * 3, advantage=a) for a in advantages]
    batch, logprobs = make_batch(made, "token_mean", spread=0.3, seed=1)
    batch = replace(batch, ref_logprobs=None)

    def run(low: float, high: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        values = logprobs.values.detach().requires_grad_()
        clip = {"eps_clip": low, "eps_clip_high": high, "is_cap_high": 1 + high}
        config = with_values(LossConfig(), **clip)
        output = LOSSES[name](batch, LogProbs(values), config)
        (gradient,) = torch.autograd.grad(output.loss, values)
        return gradient[batch.loss_mask], output.metrics

    gradient, metrics = run(0.05, 0.1)
    whole, _ = run(1e9, 1e9)
    pushed = batch.advantages[batch.loss_mask]
    removed = (gradient.abs() < whole.abs()) & (pushed != 0) if name == "cispo" else (gradient == 0) & (whole != 0)
    low, high = removed & (pushed < 0), removed & (pushed > 0)
    assert high.any()
    if name == "cispo":  # one cap, for both signs
        low, high = torch.zeros_like(low), removed
    else:
        assert low.any()
    torch.testing.assert_close(metrics["policy/clip_fraction_low"], low.double().mean(), rtol=1e-12, atol=0)
    torch.testing.assert_close(metrics["policy/clip_fraction_high"], high.double().mean(), rtol=1e-12, atol=0)
