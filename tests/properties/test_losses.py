"""Gradients do not depend on packing, micro-batches or ranks (docs/architecture.md, invariant 2)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.metrics import finish_metrics
from fsdptrain.algo.weights import AGGREGATIONS, count_totals, num_loss_tokens
from fsdptrain.data.packing.pack import pack, plan_packs
from fsdptrain.types import LogProbs, LossConfig, PackedBatch, Sample
from tests.properties.strategies import sample_lists

VOCAB = 11
CONFIG = LossConfig(eps_clip_c=3.0, kl_loss_coef=0.1, entropy_coef=0.01)
SEQUENCES = LossConfig(
    eps_clip=0.1, use_opsm=True, mismatch_correction="mis_sequence", mismatch_low=0.1, mismatch_high=9.0,
    kl_loss_coef=0.1, kl_loss_type="low_var_kl", use_unbiased_kl=True,
)  # fmt: skip
TRUNCATED = LossConfig(eps_clip_c=1.5, is_cap_high=1.2, mismatch_correction="tis_sequence", mismatch_low=0.0)


def table(seed: int) -> Tensor:
    """A bigram model, [V, V] f64: logits of the next token by the current one."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logprobs_of(model: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    logprobs = model[batch.input_ids % VOCAB].log_softmax(-1)
    values = logprobs.gather(-1, (batch.labels % VOCAB).unsqueeze(-1)).squeeze(-1)
    return values, -(logprobs.exp() * logprobs).sum(-1)


def step(
    samples: list[Sample],
    aggregation: str,
    *,
    num_ranks: int,
    max_tokens: int,
    loss_name: str = "grpo",
    config: LossConfig = CONFIG,
) -> tuple:
    """Loss, gradient and metrics of one optimizer step, summed over the packs of all ranks as FSDP does."""
    model = table(0).requires_grad_()
    totals = count_totals([num_loss_tokens(sample) for sample in samples])
    plan = plan_packs([len(sample.token_ids) for sample in samples], num_ranks=num_ranks, max_tokens=max_tokens)
    loss, metrics = torch.zeros((), dtype=torch.float64), dict[str, float]()
    for indices in (indices for rank in plan.packs for indices in rank):
        batch = pack([samples[i] for i in indices], aggregation=aggregation, totals=totals, max_response_len=24)
        with torch.no_grad():
            old, _ = logprobs_of(table(1), batch)
            ref, _ = logprobs_of(table(2), batch)
        values, entropy = logprobs_of(model, batch)
        batch = PackedBatch(**{**vars(batch), "old_logprobs": old, "ref_logprobs": ref})
        output = LOSSES[loss_name](batch, LogProbs(values, entropy), config)
        output.loss.backward()
        loss = loss + output.loss.detach()
        for name, value in output.metrics.items():
            so_far = metrics.get(name, 0.0)
            metrics[name] = max(so_far, value.item()) if name.endswith("_max") else so_far + value.item()
    assert model.grad is not None
    return loss, model.grad, finish_metrics(metrics, num_tokens=totals.num_tokens)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("loss_name", sorted(LOSSES))
@settings(max_examples=10)
@given(
    samples=sample_lists(min_size=1),
    config=st.sampled_from([CONFIG, SEQUENCES, TRUNCATED]),
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(24, 100),
)
def test_loss_gradient_and_metrics_do_not_depend_on_packs_or_ranks(
    loss_name, aggregation, samples, config, num_ranks, max_tokens
):
    which = {"loss_name": loss_name, "config": config}
    alone = step(samples, aggregation, num_ranks=1, max_tokens=10_000, **which)
    split = step(samples[::-1], aggregation, num_ranks=num_ranks, max_tokens=max_tokens, **which)
    scale = max(1.0, float(alone[1].abs().max()))
    torch.testing.assert_close(split[0], alone[0], rtol=1e-12, atol=1e-12 * scale)
    torch.testing.assert_close(split[1], alone[1], rtol=1e-12, atol=1e-12 * scale)
    for name, value in alone[2].items():
        assert split[2][name] == pytest.approx(value, rel=1e-10, abs=1e-11), name
