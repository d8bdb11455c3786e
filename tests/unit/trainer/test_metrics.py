"""Metrics of a rollout, and of several optimizer steps as one record."""

from fsdptrain import platform
from fsdptrain.rewards.parallel import RewardResult, RewardResults
from fsdptrain.trainer.metrics import mean_metrics, sample_metrics
from fsdptrain.trainer.samples.source import RolloutBatch
from fsdptrain.types import Sample


def test_reward_metrics_include_unscored_samples_of_all_groups() -> None:
    """Dynamic sampling has left out the two groups that were not scored; a detail is called as a metric of ours."""
    of, other = ("g", [1, 2], [False, True], [0.0] * 2), Sample("g", [3], [True], [0.0])
    kept = [Sample(*of, reward=r, rewards={"mean": 9.0, "math": r}, others=(other,)) for r in (0.0, 1.0)]
    results = RewardResults(
        [RewardResult(0.0), RewardResult(1.0), RewardResult(None), RewardResult(None)], 2, "no reason"
    )
    with platform.process_group(60):
        metrics = sample_metrics(RolloutBatch(kept, results=results))
    assert (metrics["reward/mean"], metrics["reward/math"]) == (0.5, 0.5)
    assert (metrics["reward/unscored_fraction"], metrics["completion/length_mean"]) == (0.5, 2.0)


def test_rewards_of_other_rows_do_not_count_in_the_mean_of_one() -> None:
    kept = [Sample("g", [1], [True], [0.0], reward=0.0, rewards=each) for each in ({"math": 1.0}, {"code": 0.5}, {})]
    batch = RolloutBatch(kept, results=RewardResults([RewardResult(0.0)] * 3, 0, None))
    with platform.process_group(60):
        found = sample_metrics(batch, by_row=True)
    assert (found["reward/math"], found["reward/code"]) == (1.0, 0.5)


def test_a_skipped_step_does_not_change_the_gradient_norm() -> None:
    taken = {"loss/total": 1.0, "optim/grad_norm": 2.0, "optim/skipped_steps": 1.0}
    skipped = {"loss/total": 3.0, "optim/skipped_steps": 1.0}
    merged = {"loss/total": 2.0, "optim/grad_norm": 2.0, "optim/skipped_steps": 1.0}
    assert mean_metrics([taken, skipped], [5, 0]) == merged
    assert mean_metrics([skipped, taken], [0, 5]) == merged
    assert mean_metrics([], []) == {}


def test_steps_are_combined_as_their_metrics_need() -> None:
    """Means over tokens weigh each step by its tokens; maxima, counters and the learning rate are not averaged."""
    names = ("policy/entropy", "loss/total", "mismatch/abs_max", "mine/any_max", "optim/skipped_steps", "optim/lr")
    first = dict(zip(names, (1.0, 1.0, 1.0, 5.0, 1.0, 3.0), strict=True))
    second = dict(zip(names, (0.0, 0.0, 2.0, 4.0, 2.0, 1.0), strict=True))
    assert mean_metrics([first, second], [30, 10]) == dict(zip(names, (0.75, 0.5, 2.0, 5.0, 2.0, 1.0), strict=True))
