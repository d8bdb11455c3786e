"""Scoring of responses. A sample that cannot be scored does not end the run; too many do."""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdptrain.distributed import gather, sum_over_ranks
from fsdptrain.errors import RewardError
from fsdptrain.rewards.parallel import ParallelReward
from fsdptrain.rewards.values import RewardResult
from fsdptrain.types import Prompt


@dataclass(frozen=True)
class RewardResults:
    """Scores of responses, in order."""

    results: list[RewardResult]
    num_unscored: int
    first_error: str | None  # error of the first unscored response; None if all were scored


def compute_rewards(reward: ParallelReward, prompts: Sequence[Prompt], texts: Sequence[str]) -> RewardResults:
    """Score `texts[i]` as a response to `prompts[i]`. Call it once per rank for a rollout or round.

    If the reward raises, or returns None or a non-finite or non-numeric value, the sample is unscored.
    """
    outcomes = reward.run(list(zip(prompts, texts, strict=True)))
    errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
    return RewardResults(
        [RewardResult(None) if isinstance(outcome, str) else outcome for outcome in outcomes],
        num_unscored=len(errors),
        first_error=errors[0] if errors else None,
    )


def check_failed_rewards(results: RewardResults, *, max_unscored_fraction: float) -> int:
    """Return the number of unscored samples on all ranks. Collective. Raises RewardError on all ranks if too many."""
    unscored, total = map(int, sum_over_ranks([results.num_unscored, len(results.results)]))
    if unscored > max_unscored_fraction * total:
        first_error = next((error for error in gather(results.first_error) if error), None)
        raise RewardError(
            f"--reward could not score {unscored} of {total} samples, more than --max-unscored-fraction "
            f"{max_unscored_fraction}; the first reason: {first_error}"
        )
    return unscored
