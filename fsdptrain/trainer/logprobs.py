"""Old and reference logprobs of a rollout, computed before its first update."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.config.presets import is_custom
from fsdptrain.config.rules import Fact
from fsdptrain.trainer.batches import StepBatches
from fsdptrain.types import LogProbs, PackedBatch

if TYPE_CHECKING:
    from fsdptrain.protocols import TrainBackend


def compute_logprobs(config: Config, backend: "TrainBackend", steps: Sequence[StepBatches]) -> list[StepBatches]:
    """Fill `old_logprobs` and `ref_logprobs` of packs, as far as the loss reads them. Collective."""
    packs = [pack for step in steps for pack in step.packs]
    if config.algorithm.algorithm == "sft":
        return list(steps)
    if config.algorithm.use_rollout_logprobs:
        packs = [replace(pack, old_logprobs=pack.rollout_logprobs) for pack in packs]
    elif config.scores_policy:
        is_read = config.has(Fact.POLICY_SCORES) or is_custom(config.algorithm.loss)
        # else the policy that the first step trains is the one that would compute its old logprobs
        start = 0 if is_read or config.batch.epochs_per_rollout > 1 else len(steps[0].packs)
        logprobs = backend.compute_logprobs(packs[start:], "policy")
        scored = zip(_with(packs[start:], "old_logprobs", logprobs), logprobs, strict=True)
        packs = [*packs[:start], *(replace(pack, extras={**pack.extras, **one.extras}) for pack, one in scored)]
    if config.needs_reference:
        packs = _with(packs, "ref_logprobs", backend.compute_logprobs(packs, "reference"))
    remaining = iter(backend.features.chained(lambda feature, scored: feature.score_packs(scored), packs))
    return [replace(step, packs=[next(remaining) for _ in step.packs]) for step in steps]


def _with(packs: Sequence[PackedBatch], field: str, logprobs: Sequence[LogProbs]) -> list[PackedBatch]:
    values = [one.values.pin_memory() if platform.has_accelerator() else one.values for one in logprobs]
    return [replace(pack, **{field: one}) for pack, one in zip(packs, values, strict=True)]
