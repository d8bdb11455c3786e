"""KL in the reward on real ranks: KL per sample, and new advantages in each pack."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdptrain.algo.advantages import ADVANTAGES, AdvantageRule, assign_advantages, scale_over_batch
from fsdptrain.algo.kl import KL_ESTIMATORS
from fsdptrain.algo.losses import LOSSES
from fsdptrain.config.presets import ADVANTAGE_SCALES
from fsdptrain.trainer.batches import PackingRules, StepBatches, make_batches
from fsdptrain.trainer.kl_reward import kl_in_reward
from fsdptrain.trainer.logprobs import regrouped
from fsdptrain.trainer.metrics import reduce_sums
from fsdptrain.trainer.samples.source import own_share
from fsdptrain.types import LogProbs, LossConfig, PackedBatch, Sample
from tests.exact import Exact
from tests.testing import spawn

VOCAB = 7
COEF = 0.3
RULES = PackingRules(
    max_tokens=60,
    aggregation="sequence_mean",
    max_response_len=30,
    steps_per_epoch=2,
    num_epochs=1,
    seed=0,
    layout="packed",
)


def rule_of(estimator: str) -> AdvantageRule:
    return AdvantageRule(ADVANTAGES[estimator], ADVANTAGE_SCALES[estimator])


def groups() -> list[list[Sample]]:
    """Of all ranks: ragged, with several turns, one sample unscored, one without loss tokens, one group flat."""
    rng = Random(0)
    made = [[sample(rng, f"g{i}", reward=float(rng.random() < 0.5)) for _ in range(3)] for i in range(5)]
    made[1][2] = replace(made[1][2], reward=None)
    made[2][0] = replace(made[2][0], loss_mask=[False] * len(made[2][0].token_ids))
    made[3] = [replace(member, reward=1.0) for member in made[3]]
    return made


def sample(rng: Random, group_id: str, reward: float) -> Sample:
    length = rng.randrange(3, 30)
    mask = [False] + [rng.random() < 0.7 for _ in range(length - 1)]
    return Sample(group_id, [rng.randrange(VOCAB) for _ in range(length)], mask, [0.0] * length, reward=reward)


def table(seed: int) -> Tensor:
    """A bigram model: logits of the next token by the present one."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logprobs_of(model: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    return model[inputs].log_softmax(-1).gather(-1, labels[:, None])[:, 0]


def advantages_by(estimator: str) -> Callable[[list[Sample]], list[Sample]]:
    def advantages(samples: list[Sample]) -> list[Sample]:
        return scale_over_batch(assign_advantages(samples, rule_of(estimator)), rule_of(estimator), reduce_sums)

    return advantages


def scored_batches(samples: list[Sample]) -> list[StepBatches]:
    def scored(pack: PackedBatch) -> PackedBatch:
        old, ref = (logprobs_of(table(seed), pack.input_ids, pack.labels) for seed in (1, 2))
        return replace(pack, old_logprobs=old, ref_logprobs=ref)

    steps = make_batches(samples, RULES, rollout=0)
    return regrouped(steps, [scored(pack) for step in steps for pack in step.packs])


def trained(estimator: str, kl: str, epochs: int) -> tuple[dict[tuple, tuple], Tensor, dict[str, float]]:
    """{tokens: advantages at its loss tokens, and elsewhere} of this rank's packs, gradient of all ranks, metrics."""
    with Exact():
        return trained_in_float64(estimator, kl, epochs)


def trained_in_float64(estimator: str, kl: str, epochs: int) -> tuple[dict[tuple, tuple], Tensor, dict[str, float]]:
    mine = [member for group in own_share(groups()) for member in group]
    before = scored_batches(mine) * epochs
    steps, metrics = kl_in_reward(mine, before, coef=COEF, estimator=kl, advantages=advantages_by(estimator))
    found = {}
    model = table(0).requires_grad_()
    for step in steps:
        for pack in step.packs:
            columns = (pack.input_ids, pack.advantages, pack.loss_mask)
            for tokens, values, mask in zip(*(column.split(pack.seqlens) for column in columns), strict=True):
                found[tuple(tokens.tolist())] = (set(values[mask].tolist()), set(values[~mask].tolist()))
            values = logprobs_of(model, pack.input_ids, pack.labels)
            LOSSES["reinforce"](pack, LogProbs(values), LossConfig()).loss.backward()
    assert model.grad is not None
    dist.all_reduce(model.grad)
    return found, model.grad, metrics


def expected(estimator: str, kl: str) -> tuple[dict[tuple, float], list[float]]:
    """{tokens: advantage} and the KL of each sample, sample by sample, without packs and ranks."""
    changed, sums = [], []
    for member in (member for group in groups() for member in group):
        ids = torch.tensor(member.token_ids)
        at = torch.tensor(member.loss_mask[1:])
        log_ratio = logprobs_of(table(1), ids[:-1], ids[1:]) - logprobs_of(table(2), ids[:-1], ids[1:])
        sums.append(KL_ESTIMATORS[kl](log_ratio)[at].sum().item())
        reward = None if member.reward is None else member.reward - COEF * sums[-1]
        changed.append(replace(member, reward=reward))
    rule = rule_of(estimator)
    assigned = scale_over_batch(assign_advantages(changed, rule), rule, lambda sums: sums)
    return {tuple(member.token_ids): member.advantage for member in assigned}, sums


@pytest.mark.parametrize(("estimator", "kl"), [("grpo", "k1"), ("reinforce++_baseline", "k3")])
def test_advantages_and_gradient_are_those_of_whole_groups_whatever_the_ranks(estimator: str, kl: str) -> None:
    wanted, sums = expected(estimator, kl)
    assert len(wanted) == 15
    num_tokens = sum(sum(member.loss_mask) for group in groups() for member in group)
    gradients = []
    for world_size in (1, 4):
        results = spawn(world_size, trained, estimator, kl, 1)
        found = {tokens: values for result in results for tokens, values in result[0].items() if tokens != (0,)}
        assert found.keys() == wanted.keys()
        for tokens, (at_loss, elsewhere) in found.items():
            assert elsewhere <= {0.0}
            assert list(at_loss) == pytest.approx([wanted[tokens]] * len(at_loss), rel=1e-12, abs=1e-12)
        for _, gradient, metrics in results:
            gradients.append(gradient)
            assert metrics["kl/reward_mean"] == pytest.approx(sum(sums) / 15, rel=1e-12)
            assert metrics["reward/kl"] == pytest.approx(-COEF * sum(sums) / 15, rel=1e-12)
            assert metrics["policy/ref_kl"] == pytest.approx(sum(sums) / num_tokens, rel=1e-12)
    assert gradients[0].abs().max() > 1e-3
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-12, atol=1e-14)


def test_a_sample_that_is_trained_on_twice_is_penalized_once() -> None:
    [(once, _, _)] = spawn(1, trained, "grpo", "k1", 1)
    for found, _, metrics in spawn(2, trained, "grpo", "k1", 3):
        for tokens, (at_loss, _) in found.items():
            assert tokens == (0,) or sorted(at_loss) == pytest.approx(sorted(once[tokens][0]), rel=1e-12, abs=1e-12)
        assert metrics["kl/reward_mean"] == pytest.approx(sum(expected("grpo", "k1")[1]) / 15, rel=1e-12)
