"""The rewards of a run: all samples of a rank at once, in worker processes."""

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from fsdptrain.cgroup import cgroup_files
from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.protocols import RewardFunction
from fsdptrain.rewards.build import Component, WeightedSum
from fsdptrain.rewards.calls import Outcome, RewardCalls, WrongValue, attempt
from fsdptrain.rewards.functions import environment, exact, format_tags
from fsdptrain.rewards.pool import RewardPool
from fsdptrain.rewards.values import RewardResult, to_result
from fsdptrain.types import Prompt

FAST = (environment, exact, format_tags)  # rewards that neither hang nor take longer than a message to a process
DEFAULT_TIMEOUT_S = 300.0


class ParallelReward:
    """A reward for all samples of a rank at once. Close it to end its worker processes.

    Args:
        num_workers: processes per component; 0: a thread of this process
        timeout: of one call [s]
        patience: see `RewardPool` [s]
    """

    def __init__(self, reward: RewardFunction, *, num_workers: int, timeout: float, patience: float) -> None:
        self.reward = reward
        self._components = reward.components if isinstance(reward, WeightedSum) else (Component("", 1.0, reward),)
        self._pools: dict[str, RewardPool] = {}
        with ExitStack() as stack:
            for component in self._components:
                if component.function not in FAST:
                    where = _name(component)
                    calls = RewardCalls(component.function, component.name, timeout)
                    self._pools[component.name] = RewardPool(calls, num_workers, where=where, patience=patience)
                    stack.callback(self._pools[component.name].close)
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def check(self, prompt: Prompt) -> list[str]:
        """Call each reward of the user once, with an empty response to `prompt`. Returns a line for each that fails.

        Raises ConfigError if its signature does not allow the calls, or if it returns a value of a wrong type.
        """
        lines: list[str] = []
        for pool in self._pools.values():
            pool.reward.check(prompt, where=pool.where)
            if _is_ours(pool.reward.function):
                continue
            [outcome] = pool.run([(prompt, "")])
            if isinstance(outcome, WrongValue):
                raise ConfigError(f"{pool.where}, called with the first row and an empty response: {outcome}")
            if isinstance(outcome, str):
                lines.append(f"{pool.where} cannot score an empty response to the first row: {outcome}")
        return lines

    def run(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Outcome]:
        """Score `texts[i]` as a response to `prompts[i]`; a text says why a sample is unscored."""
        calls = list(zip(prompts, texts, strict=True))
        columns = [self._run(component, calls) for component in self._components]
        return [self._combine(outcomes) for outcomes in zip(*columns, strict=True)]

    def _run(self, component: Component, calls: Sequence[tuple[Prompt, str]]) -> list[Outcome]:
        if component.name in self._pools:
            return self._pools[component.name].run(calls)
        return [attempt(component.function, *call, name=component.name) for call in calls]

    def _combine(self, outcomes: Sequence[Outcome]) -> Outcome:
        scores = [outcome for outcome in outcomes if isinstance(outcome, RewardResult)]
        if len(scores) < len(outcomes):
            return next(outcome for outcome in outcomes if isinstance(outcome, str))
        if not isinstance(self.reward, WeightedSum):
            return scores[0]
        try:
            return to_result(self.reward.combine(scores))
        except ValueError as error:
            return str(error)


def _name(component: Component) -> str:
    """Return the reward for messages: `--reward module:function`."""
    function = component.function
    qualified = getattr(function, "__qualname__", None)
    if _is_ours(function) or qualified is None:
        return f"--reward {component.name}".strip()
    return f"--reward {function.__module__}:{qualified}"


def _is_ours(function: RewardFunction) -> bool:
    return str(getattr(function, "__module__", "")).startswith("fsdptrain.rewards.")


def build_parallel(config: Config, reward: RewardFunction) -> ParallelReward:
    """Start the rewards of a run with --reward-workers, --reward-timeout and half of --dist-timeout."""
    patience, workers = config.reward_patience, config.reward.reward_workers
    return ParallelReward(
        reward,
        num_workers=default_workers() if workers is None else workers,
        timeout=config.reward.reward_timeout or min(DEFAULT_TIMEOUT_S, patience / 3),
        patience=patience,
    )


def default_workers() -> int:
    """Return the number of cores that this rank may use, at least 1: those of the machine divided by its ranks."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for path in cgroup_files("cpu.max"):
        with suppress(OSError, ValueError):  # "max 100000": no quota
            quota, period = map(int, path.read_text().split())
            cores = min(cores, quota / period)
    return max(1, int(cores / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
