"""Logprobs computed before the first update, and logprobs passed to the loss."""

from collections.abc import Sequence
from typing import cast

import pytest
import torch

from fsdptrain.config import Config
from fsdptrain.data.packing.pack import pack
from fsdptrain.data.packing.sample_index import gather_index
from fsdptrain.enabled_features import NO_FEATURES
from fsdptrain.protocols import ModelRole, TrainBackend
from fsdptrain.trainer.batches import StepBatches
from fsdptrain.trainer.logprobs import compute_logprobs
from fsdptrain.types import LogProbs, PackedBatch, Sample

SAMPLES = [Sample("g", [1, 2, 3], [False, True, True], [0.0, -0.5, -0.25]) for _ in range(2)]


class Scored:
    """Returns the number of the call as logprobs, and records the models."""

    features = NO_FEATURES

    def __init__(self) -> None:
        self.asked: list[ModelRole] = []

    def compute_logprobs(self, batches: Sequence[PackedBatch], model: ModelRole) -> list[LogProbs]:
        self.asked.append(model)
        return [LogProbs(torch.full((batch.num_tokens,), float(len(self.asked)))) for batch in batches]


def two_steps() -> list[StepBatches]:
    index = gather_index(SAMPLES)
    packs = [
        pack([member], aggregation="token_mean", totals=index.totals([i], [i]), max_response_len=2)
        for i, member in enumerate(SAMPLES)
    ]
    return [StepBatches([packed], 1.0, 0.0) for packed in packs]


OFF_POLICY = {"global_batch_size": 128}
BYPASS = {"use_rollout_logprobs": True}


@pytest.mark.parametrize(
    ("values", "asked", "seen"),
    [
        ({}, [], []),
        (OFF_POLICY, ["policy"], ["old of later steps"]),
        ({"epochs_per_rollout": 2, **OFF_POLICY}, ["policy"], ["old"]),
        (BYPASS, [], ["old"]),
        ({"kl_loss_coef": 0.1}, ["reference"], ["ref"]),
        ({"algorithm": "sft"}, [], []),
    ],
    ids=str,
)
def test_only_needed_logprobs_are_computed_and_passed_to_the_loss(values, asked, seen):
    backend, before = Scored(), two_steps()
    steps = compute_logprobs(
        Config(**{"hf_checkpoint": "x", "kl_loss_coef": 0.0, **values}), cast(TrainBackend, backend), before
    )
    assert backend.asked == asked
    for number, (step, given) in enumerate(zip(steps, before, strict=True)):
        [packed] = step.packs
        assert torch.equal(packed.input_ids, given.packs[0].input_ids)
        fields = {"old": packed.old_logprobs, "ref": packed.ref_logprobs}
        wanted = [name.removesuffix(" of later steps") for name in seen if number or not name.endswith("later steps")]
        assert [name for name, value in fields.items() if value is not None] == wanted
        if values.get("use_rollout_logprobs"):
            assert packed.old_logprobs is packed.rollout_logprobs
