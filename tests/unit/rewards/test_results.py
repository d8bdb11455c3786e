"""Values of rewards, errors, and unscored samples."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fsdptrain.errors import RewardError
from fsdptrain.rewards.parallel import check_failed_rewards, compute_rewards
from fsdptrain.rewards.values import RewardResult
from fsdptrain.types import Prompt
from tests.rewards import in_process
from tests.testing import spawn

PROMPT = Prompt("p", [1], "")


def score_of(value: Any) -> RewardResult:
    return compute_rewards(in_process(lambda _prompt, _text: value), [PROMPT], [""]).results[0]


@pytest.mark.parametrize(
    "value",
    [1, 1.0, True, np.float32(1), np.array([1.0]), torch.tensor(1.0), torch.ones(1, 1), {"reward": np.int64(1)}],
)
def test_any_number_is_a_reward(value: Any) -> None:
    assert score_of(value) == RewardResult(1.0)


def test_a_mapping_is_its_reward_or_the_sum_of_its_parts() -> None:
    assert score_of({"a": 1, "b": 0.5}) == RewardResult(1.5, {"a": 1.0, "b": 0.5})
    assert score_of({"tokens": 2e6, "reward": 7}) == RewardResult(7.0, {"tokens": 2e6})  # only reported
    assert score_of({"a": 1, "b": 0.5, "reward": 7}) == RewardResult(7.0, {"a": 1.0, "b": 0.5})


@pytest.mark.parametrize(
    "value",
    [
        *(None, math.nan, math.inf, "1.0", [1.0], {"a": None}, {"a": math.nan}, object(), 1e200, -1e7, {1: 1.0}, {}),
        *(np.ones(2), torch.ones(2), np.array(["1"])),
    ],
)
def test_a_value_that_is_no_finite_number_leaves_the_sample_unscored(value: Any) -> None:
    assert score_of(value) == RewardResult(None)


def failing(_prompt: Prompt, text: str) -> float | None:
    if text == "none":
        return None
    return 1 / int(text)


def test_an_error_in_a_reward_costs_one_sample_and_the_first_is_kept() -> None:
    results = compute_rewards(in_process(failing), [PROMPT] * 5, ["1", "0", "none", "x", "2"])
    assert [score.reward for score in results.results] == [1.0, None, None, None, 0.5]
    assert results.num_unscored == 3
    assert results.first_error is not None
    assert results.first_error.startswith("ZeroDivisionError: division by zero (test_results.py:")


def test_too_many_unscored_samples_stop_the_run_with_the_first_reason() -> None:
    results = compute_rewards(in_process(failing), [PROMPT] * 4, ["1", "none", "1", "1"])
    assert check_failed_rewards(results, max_unscored_fraction=0.25) == 1
    with pytest.raises(RewardError, match=r"1 of 4 samples.*--max-unscored-fraction 0.2;.*the reward returned None"):
        check_failed_rewards(results, max_unscored_fraction=0.2)
    assert check_failed_rewards(compute_rewards(in_process(failing), [], []), max_unscored_fraction=0.0) == 0


def check_on_ranks(limits: list[float]) -> list[int | str]:
    """Rank 1 of 3 has all the trouble."""
    texts = ["none", "0"] if dist.get_rank() == 1 else ["1"] * 4
    results = compute_rewards(in_process(failing), [PROMPT] * len(texts), texts)
    outcomes: list[int | str] = []
    for limit in limits:
        try:
            outcomes.append(check_failed_rewards(results, max_unscored_fraction=limit))
        except RewardError as error:
            outcomes.append(str(error).partition("first reason: ")[2])
    return outcomes


@pytest.mark.slow
def test_the_unscored_fraction_is_that_of_all_ranks() -> None:
    [[unscored, line], *others] = spawn(3, check_on_ranks, [0.2, 0.1])
    assert others == [[unscored, line]] * 2
    assert (unscored, line.partition(" (")[0]) == (2, "the reward returned None, which means that it cannot score this")
