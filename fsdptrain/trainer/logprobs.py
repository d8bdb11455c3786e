"""Old and reference logprobs of a rollout, computed before its first update."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.config.presets import is_own
from fsdptrain.feature import NO_FEATURES, Features
from fsdptrain.protocols import TrainBackend
from fsdptrain.trainer.batches import StepBatches
from fsdptrain.trainer.samples.source import RolloutBatch
from fsdptrain.types import LogProbs, Metrics, PackedBatch, Sample


@dataclass(frozen=True)
class LogprobPasses:
    """Fills `old_logprobs` and `ref_logprobs` of packs. Every method is collective, because the backend's are."""

    config: Config
    backend: TrainBackend
    features: Features = NO_FEATURES

    def of_rollout(
        self, steps: list[StepBatches], rollout: RolloutBatch, advantages: Callable[[list[Sample]], list[Sample]]
    ) -> tuple[list[StepBatches], Metrics]:
        """Compute the logprobs and the KL term of the reward before the first update, for all epochs of a rollout.

        advantages: computes advantages from the rewards with the KL term. Collective.
        """
        per_epoch = self.config.steps_per_rollout // self.config.batch.epochs_per_rollout
        first, later = self.compute(steps[:per_epoch]), steps[per_epoch:]
        metrics: Metrics = {}
        algorithm = self.config.algorithm
        if algorithm.kl_reward_coef:
            from fsdptrain.trainer.kl_reward import kl_in_reward

            first, metrics = kl_in_reward(
                rollout.samples,
                first,
                coef=algorithm.kl_reward_coef,
                estimator=algorithm.kl_reward_type,
                advantages=advantages,
            )
            first = self.for_loss(first)
        if later:
            from fsdptrain.trainer.epochs import carry_scores

            later = carry_scores(first, later)
        return [*first, *later], metrics

    def compute(self, steps: Sequence[StepBatches]) -> list[StepBatches]:
        """Compute only the logprobs that the loss or the KL term of the reward needs."""
        algorithm = self.config.algorithm
        packs = [pack for step in steps for pack in step.packs]
        if algorithm.algorithm == "sft":
            return list(steps)
        if algorithm.use_rollout_logprobs:
            packs = [replace(pack, old_logprobs=pack.rollout_logprobs) for pack in packs]
        elif self.config.scores_policy:
            start = len(steps[0].packs) if self._first_step_is_on_policy else 0
            logprobs = self.backend.compute_logprobs(packs[start:], "policy")
            scored = _with(packs[start:], "old_logprobs", logprobs)
            packs = [*packs[:start], *map(_with_extras, scored, logprobs)]
        if self.config.needs_reference:
            packs = _with(packs, "ref_logprobs", self.backend.compute_logprobs(packs, "reference"))
        return regrouped(steps, self.features.score_packs(packs))

    @property
    def _first_step_is_on_policy(self) -> bool:
        """Whether the first step needs no old logprobs: the policy that it trains is the one that would compute them.

        Not if something else reads them: the KL term of the reward, later epochs, a feature, or a loss of the user.
        """
        algorithm = self.config.algorithm
        reads = any(section.needs_policy_scores for section in self.config.sections)
        reads = reads or algorithm.kl_reward_coef > 0 or is_own(algorithm.loss)
        return not reads and self.config.batch.epochs_per_rollout == 1

    def for_loss(self, steps: Sequence[StepBatches]) -> list[StepBatches]:
        """Remove the logprobs that only the reward needed, so that a strictly on-policy ratio stays exactly 1."""
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
    """Replace the packs of `steps` with `packs`, which are in the same order."""
    remaining = iter(packs)
    return [replace(step, packs=[next(remaining) for _ in step.packs]) for step in steps]


def _with_extras(pack: PackedBatch, logprobs: LogProbs) -> PackedBatch:
    return replace(pack, extras={**pack.extras, **logprobs.extras})


def _with(packs: Sequence[PackedBatch], field: str, logprobs: Sequence[LogProbs]) -> list[PackedBatch]:
    values = [one.values.pin_memory() if platform.has_accelerator() else one.values for one in logprobs]
    return [replace(pack, **{field: one}) for pack, one in zip(packs, values, strict=True)]
