"""Old and reference log-probabilities of a rollout, before its first update."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdptrain.config import Config
from fsdptrain.protocols import TrainBackend
from fsdptrain.trainer.batches import StepBatches
from fsdptrain.types import LogProbs, PackedBatch


@dataclass(frozen=True)
class Scorer:
    """Fills `old_logprobs` and `ref_logprobs` of packs. Every method of the backend is collective, and so is this."""

    config: Config
    backend: TrainBackend

    def score(self, steps: Sequence[StepBatches]) -> list[StepBatches]:
        """With what the loss or the KL in the reward compares with, and nothing that neither of them looks at."""
        algorithm = self.config.algorithm
        packs = [pack for step in steps for pack in step.packs]
        if algorithm.algorithm == "sft":
            return list(steps)
        if algorithm.use_rollout_logprobs:
            packs = [replace(pack, old_logprobs=pack.rollout_logprobs) for pack in packs]
        elif self.config.scores_policy:
            scores = self.backend.score(packs, "policy")
            packs = _with(packs, "old_logprobs", scores)
            if self.config.router.replay == "scoring":
                packs = [replace(pack, routes=score.routes) for pack, score in zip(packs, scores, strict=True)]
        if self.config.needs_reference:
            packs = _with(packs, "ref_logprobs", self.backend.score(packs, "reference"))
        return regrouped(steps, packs)

    def for_loss(self, steps: Sequence[StepBatches]) -> list[StepBatches]:
        """Without what only the reward asked for: so a strictly on-policy ratio stays exactly 1."""
        algorithm = self.config.algorithm
        keep_old = algorithm.use_rollout_logprobs or self.config.needs_old_logprobs
        packs = [
            replace(
                pack,
                old_logprobs=pack.old_logprobs if keep_old else None,
                ref_logprobs=pack.ref_logprobs if algorithm.kl_loss_coef > 0 else None,
            )
            for step in steps
            for pack in step.packs
        ]
        return regrouped(steps, packs)


def regrouped(steps: Sequence[StepBatches], packs: Sequence[PackedBatch]) -> list[StepBatches]:
    """`steps` with `packs`, which stand in the same order, in place of their own."""
    remaining = iter(packs)
    return [replace(step, packs=[next(remaining) for _ in step.packs]) for step in steps]


def _with(packs: Sequence[PackedBatch], field: str, scores: Sequence[LogProbs]) -> list[PackedBatch]:
    return [replace(pack, **{field: score.values}) for pack, score in zip(packs, scores, strict=True)]
