"""Old and reference logprobs of a rollout, computed before its first update."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.config.presets import is_custom
from fsdptrain.config.rules import Fact
from fsdptrain.enabled_features import NO_FEATURES, Features
from fsdptrain.trainer.batches import StepBatches
from fsdptrain.types import LogProbs, PackedBatch

if TYPE_CHECKING:
    from fsdptrain.protocols import TrainBackend


@dataclass(frozen=True)
class LogprobPasses:
    """Fills `old_logprobs` and `ref_logprobs` of packs. Collective, because the backend's methods are."""

    config: Config
    backend: "TrainBackend"
    features: Features = NO_FEATURES

    def compute(self, steps: Sequence[StepBatches]) -> list[StepBatches]:
        """Compute the logprobs that the loss reads."""
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
        remaining = iter(self.features.chained(lambda feature, scored: feature.score_packs(scored), packs))
        return [replace(step, packs=[next(remaining) for _ in step.packs]) for step in steps]

    @property
    def _first_step_is_on_policy(self) -> bool:
        """Whether the first step needs no old logprobs: the policy that it trains is the one that would compute them.

        Not if something else reads them: later epochs, a feature, or a loss of the user.
        """
        reads = self.config.has(Fact.POLICY_SCORES)
        return not reads and not is_custom(self.config.algorithm.loss) and self.config.batch.epochs_per_rollout == 1


def _with_extras(pack: PackedBatch, logprobs: LogProbs) -> PackedBatch:
    return replace(pack, extras={**pack.extras, **logprobs.extras})


def _with(packs: Sequence[PackedBatch], field: str, logprobs: Sequence[LogProbs]) -> list[PackedBatch]:
    values = [one.values.pin_memory() if platform.has_accelerator() else one.values for one in logprobs]
    return [replace(pack, **{field: one}) for pack, one in zip(packs, values, strict=True)]
