"""Several optimizer steps of a rollout are one record."""

from fsdptrain.trainer.summary import mean_metrics


def test_a_skipped_step_has_no_gradient_norm_and_takes_none_away() -> None:
    taken = {"loss/total": 1.0, "optim/grad_norm": 2.0, "optim/skipped_steps": 1.0}
    skipped = {"loss/total": 3.0, "optim/skipped_steps": 1.0}
    merged = {"loss/total": 2.0, "optim/grad_norm": 2.0, "optim/skipped_steps": 1.0}
    assert mean_metrics([taken, skipped]) == merged
    assert mean_metrics([skipped, taken]) == merged
    assert mean_metrics([]) == {}


def test_maxima_stay_maxima_counters_stay_counters_and_the_rate_is_the_last() -> None:
    first = {"mismatch/abs_max": 1.0, "mine/any_max": 5.0, "optim/skipped_steps": 1.0, "optim/lr": 3.0}
    second = {"mismatch/abs_max": 2.0, "mine/any_max": 4.0, "optim/skipped_steps": 2.0, "optim/lr": 1.0}
    assert mean_metrics([first, second]) == {
        "mismatch/abs_max": 2.0,
        "mine/any_max": 5.0,
        "optim/skipped_steps": 2.0,
        "optim/lr": 1.0,
    }
