"""A reward for tests of samplers, which calls a function in this process."""

from typing import Any

from fsdptrain.rewards.build import Component, WeightedSum
from fsdptrain.rewards.parallel import ParallelReward


def only(reward: Any) -> WeightedSum:
    """The sum of one function, or the sum that is given."""
    return reward if isinstance(reward, WeightedSum) else WeightedSum((Component("", 1.0, reward),))


def in_process(reward: Any) -> ParallelReward:
    return ParallelReward(only(reward), num_workers=0, timeout=300.0, patience=900.0)
