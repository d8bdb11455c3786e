"""Samples with advantage 0 that are skipped: every gradient and the terms of the loss are those of a step that computes
them; the other metrics are those of the samples that are left. Plan, exchange, pack, score and train as the trainer
does it, with prefix sharing.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fsdptrain.algo.corrections import CORRECTIONS
from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.weights import AGGREGATIONS
from fsdptrain.config.presets import LOSS_OPTIONS
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.trainer.batches import StepBatches
from fsdptrain.types import LossConfig, Metrics, Sample
from tests.exact import Exact, backends_in_float64
from tests.matrix import only
from tests.tensors import relative
from tests.testing import spawn

from .test_fsdp_backend import GROUP_SIZE, config, grouped_samples, keep_gradients, make_steps, scored

SKIPPED_WITH = sorted(name for name, options in LOSS_OPTIONS.items() if options.idle_at_zero_advantage)
LEFT: dict[str, Callable[[int], bool]] = {  # which samples have an advantage
    "some": lambda i: i // GROUP_SIZE != 1 and i % 3 > 0,  # of a whole group none
    "one": lambda i: i == 6,  # ranks without work
    "none": lambda _: False,
}
EXACT = 1e-12  # relative, in float64

Step = tuple[dict[str, torch.Tensor], Metrics]  # gradients and metrics


def some_samples(left: str) -> list[Sample]:
    return [s if LEFT[left](i) else replace(s, advantage=0.0) for i, s in enumerate(grouped_samples())]


def options(number: int) -> LossConfig:
    """Another correction for each loss, with everything on that skipping allows."""
    correction = sorted(CORRECTIONS)[number % len(CORRECTIONS)]
    return LossConfig(
        eps_clip=0.05, eps_clip_high=0.06, eps_clip_c=1.2, is_cap_high=1.05, use_opsm=True, opsm_delta=0.02,
        mismatch_correction=correction, mismatch_low=0.5, mismatch_high=2.0,
    )  # fmt: skip


def rollout(backend: FSDPBackend, items: list[Sample], aggregation: str, skips: bool, steps: int = 1):
    rules = {"num_steps": steps, "aggregation": aggregation, "skips_zero_advantage": skips}
    return make_steps(backend, items, 256, **rules)


def one_step(backend: FSDPBackend, found: dict, loss: str, settings: LossConfig, steps: list[StepBatches]) -> Step:
    [step] = steps
    with Exact():
        metrics = backend.train_step(scored(backend, step.packs, reference=False), LOSSES[loss], settings)
    return dict(found), metrics


def every_loss(checkpoint: str) -> dict[tuple[str, str], tuple[Step, Step, Step, int]]:
    """Skipped, computed, without the samples that are skipped, and the tokens of this rank's packs."""
    backends_in_float64()
    backend = FSDPBackend(config(checkpoint, lr=1e-30, clip_grad=0.0, prefix_sharing=True), total_steps=10)
    gradients, found = keep_gradients(backend._optimizer), {}
    for number, loss in enumerate(SKIPPED_WITH):
        aggregation, settings = sorted(AGGREGATIONS)[number % len(AGGREGATIONS)], options(number)
        for left in LEFT if loss == "grpo" else ["some"]:
            items = some_samples(left)
            kept = [sample for sample in items if sample.advantage] or items[:1]
            cases = [rollout(backend, *case) for case in ((items, aggregation, True), (items, aggregation, False))]
            cases.append(rollout(backend, kept, aggregation, False))
            steps = [one_step(backend, gradients, loss, settings, case) for case in cases]
            found[loss, left] = (*steps, sum(pack.num_tokens for pack in cases[0][0].packs))
    return found


@pytest.fixture(scope="module", params=only([2], [1, 2]), ids=lambda ranks: f"{ranks} ranks")
def ranks(request: pytest.FixtureRequest, checkpoint: str) -> list[dict[tuple[str, str], Any]]:
    return spawn(request.param, every_loss, checkpoint)


@pytest.mark.parametrize(
    ("loss", "left"), [*((loss, "some") for loss in SKIPPED_WITH), ("grpo", "one"), ("grpo", "none")]
)
def test_a_step_without_the_samples_of_advantage_0_has_the_same_gradient_and_loss(
    ranks: list[dict[tuple[str, str], Any]], loss: str, left: str
) -> None:
    for rank in ranks:
        (mine, metrics), (theirs, expected), (_, of_left), _ = rank[loss, left]
        if left == "none":
            assert not any(gradient.any() for gradient in [*mine.values(), *theirs.values()])
            assert metrics["optim/grad_norm"] == expected["optim/grad_norm"] == 0
            assert not any(name.startswith(("policy/", "mismatch/")) for name in metrics)  # a mean over no token
        else:
            assert relative(mine, theirs) < EXACT
            assert metrics.keys() == expected.keys()
        for name, value in metrics.items():
            wanted = of_left if name.startswith(("policy/", "mismatch/")) else expected
            assert value == pytest.approx(wanted[name], rel=1e-11, abs=1e-12), name


def test_a_rank_whose_samples_are_skipped_computes_one_token(ranks: list[dict[tuple[str, str], Any]]) -> None:
    tokens = [rank["grpo", "one"][-1] for rank in ranks]
    assert sorted(tokens)[:-1] == [1] * (len(ranks) - 1)
    assert sorted(tokens)[-1] == len(grouped_samples()[6].token_ids)
    assert all(rank["grpo", "none"][-1] == 1 for rank in ranks)
