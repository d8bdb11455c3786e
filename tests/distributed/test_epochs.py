"""Several steps and epochs on one rollout: samples and old logprobs of a step do not depend on the ranks."""

import dataclasses
from itertools import chain
from typing import Any

import torch

from fsdptrain.config import Config
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.trainer.batches import PackingRules, StepBatches, make_batches
from fsdptrain.trainer.epochs import carry_scores
from fsdptrain.trainer.samples.source import own_share
from fsdptrain.types import Sample
from tests.exact import Exact, backends_in_float64
from tests.testing import save_tiny_checkpoint, spawn

GROUPS, GROUP_SIZE = 5, 3
RULES = PackingRules(
    max_tokens=64, aggregation="token_mean", max_response_len=40, steps_per_epoch=4, num_epochs=3, seed=0,
    layout="packed",
)  # fmt: skip


def group(number: int) -> list[Sample]:
    """Of unequal lengths; the first token names the sample."""
    generator = torch.Generator().manual_seed(number)
    made = []
    for place in range(GROUP_SIZE):
        length = int(torch.randint(3, 40, (), generator=generator))
        tokens = [10 + GROUP_SIZE * number + place, *torch.randint(5, 264, (length - 1,), generator=generator).tolist()]
        mask = [False, *[True] * (length - 1)]
        made.append(Sample(f"task:{number}", tokens, mask, [0.0] * length, advantage=float(place)))
    return made


def names(step: StepBatches) -> list[int]:
    """The samples in this rank's packs."""
    return [
        int(batch.input_ids[start]) for batch in step.packs for start in batch.cu_seqlens[:-1] if batch.loss_mask.any()
    ]


def by_sample(steps: list[StepBatches], field: str) -> list[tuple[int, torch.Tensor]]:
    """(name of the sample, its part of `field`) for each segment of this rank's packs, in order."""
    found = []
    for batch in (batch for step in steps for batch in step.packs if batch.loss_mask.any()):
        value = batch.extras[field] if field in batch.extras else getattr(batch, field)
        parts = value.split(batch.seqlens)
        found += list(zip(batch.input_ids[batch.cu_seqlens[:-1].long()].tolist(), parts, strict=True))
    return found


def make_steps(num_groups: int, rules: PackingRules, rollout: int = 7) -> list[StepBatches]:
    own = own_share(list(range(num_groups)))
    return make_batches([sample for number in own for sample in group(number)], rules, rollout=rollout)


def assigned(cases: list[tuple[int, Any]]) -> list[tuple[list[list[int]], list[int]]]:
    found = []
    for num_groups, layout in cases:
        steps = make_steps(num_groups, dataclasses.replace(RULES, layout=layout))
        found.append(([names(step) for step in steps], [step.packs[0].num_loss_tokens for step in steps]))
    return found


def test_the_samples_of_a_step_do_not_depend_on_the_ranks() -> None:
    cases = [(GROUPS, "packed"), (GROUPS, "padded"), (1, "packed"), (0, "packed")]
    worlds = [spawn(world_size, assigned, cases) for world_size in (1, 4)]
    for number, (num_groups, _) in enumerate(cases):
        ranks = [[result[number] for result in world] for world in worlds]
        steps = [[sorted(chain(*held)) for held in zip(*(rank[0] for rank in world), strict=True)] for world in ranks]
        assert steps[0] == steps[1]
        assert all(tokens == ranks[0][0][1] for world in ranks for _, tokens in world)
        epochs = [steps[0][start : start + 4] for start in range(0, len(steps[0]), 4)]
        assert len(steps[0]) == (12 if num_groups else 0), "also with fewer samples than steps"
        everything = [10 + i for i in range(num_groups * GROUP_SIZE)]
        assert all(sorted(chain(*epoch)) == everything for epoch in epochs)
        if num_groups == GROUPS:
            assert epochs[0] != epochs[1] != epochs[2]


def some_routes(tokens: torch.Tensor) -> torch.Tensor:
    """[T, 2, 3] that follow from the tokens."""
    return (tokens[:, None, None] * torch.arange(1, 7).view(2, 3) % 32_000).to(torch.int16)


def score_once(checkpoint: str) -> tuple[Any, Any, float]:
    """What each sample got in the first epoch and in the later ones; how far that is from scoring anew."""
    backends_in_float64()
    with Exact():
        return _score_once(checkpoint)


def _score_once(checkpoint: str) -> tuple[Any, Any, float]:
    backend = FSDPBackend(Config(hf_checkpoint=checkpoint, bf16=False), total_steps=12)
    steps = make_steps(GROUPS, RULES)
    first = []
    for step in steps[:4]:
        found = backend.compute_logprobs(step.packs, "policy")
        packs = [
            dataclasses.replace(
                b,
                old_logprobs=s.values,
                advantages=s.values.sin(),
                extras={"routes": some_routes(b.input_ids)},
            )
            for b, s in zip(step.packs, found, strict=True)
        ]
        first.append(dataclasses.replace(step, packs=packs))
    later = carry_scores(first, steps[4:])
    anew = backend.compute_logprobs([batch for step in later for batch in step.packs], "policy")
    carried = [batch for step in later for batch in step.packs]
    assert all(batch.ref_logprobs is None for batch in carried)
    difference = max(
        ((score.values - batch.old_logprobs) * batch.loss_mask).abs().max().item()
        for score, batch in zip(anew, carried, strict=True)
    )
    fields = ("old_logprobs", "advantages", "routes")
    return [by_sample(first, f) for f in fields], [by_sample(later, f) for f in fields], difference


def test_old_logprobs_are_scored_once_and_follow_their_sample_bit_by_bit(tmp_path: Any) -> None:
    checkpoint = str(save_tiny_checkpoint(tmp_path / "model"))
    results = spawn(2, score_once, checkpoint)
    for k in range(3):
        scored = {name: part for first, _, _ in results for name, part in first[k]}
        carried = [pair for _, later, _ in results for pair in later[k]]
        assert len(scored) == GROUPS * GROUP_SIZE
        assert len(carried) == 2 * len(scored), "two later epochs"
        assert all(torch.equal(part, scored[name]) for name, part in carried)
    assert all(difference < 1e-12 for *_, difference in results)
    assert any(part.abs().sum() > 0 for _, later, _ in results for _, part in later[0])
