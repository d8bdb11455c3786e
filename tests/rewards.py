"""A reward for tests of samplers, which calls a function in this process."""

from typing import Any

from fsdptrain.rewards.build import WeightedSum
from fsdptrain.rewards.parallel import ParallelReward


def in_process(reward: Any) -> ParallelReward:
    reward = reward if isinstance(reward, WeightedSum) else WeightedSum.only(reward)
    return ParallelReward(reward, num_workers=0, timeout=300.0, patience=900.0)
