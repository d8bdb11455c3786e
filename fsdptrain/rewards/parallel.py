"""Compute the rewards of a rank's samples, in processes, an event loop or the calling thread.

Unscored samples end a run only above --max-unscored-fraction.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import gather, sum_over_ranks
from fsdptrain.errors import ConfigError, RewardError
from fsdptrain.rewards.build import Component, WeightedSum
from fsdptrain.rewards.calls import Call, LostTime, Outcome, RewardCalls, check_signature
from fsdptrain.rewards.values import WRONG, RewardResult, to_result
from fsdptrain.types import Prompt

if TYPE_CHECKING:
    from fsdptrain.protocols import RewardFunction
    from fsdptrain.rewards.local import EventLoop
    from fsdptrain.rewards.pool import ProcessPool


log = logging.getLogger(__name__)

FAST = ("environment", "exact", "format_tags")  # built-in, and faster than a message to a process
GYM = ("reasoning_gym", "reasoning_gym_strict")  # as fast for tasks whose scorer compares texts or numbers:
COMPARED = {f"reasoning_gym:{task}" for task in ("gsm_symbolic", "products", "spell_backward")}
DEFAULT_TIMEOUT_S = 300.0


class Direct:
    """Calls one reward in the calling thread, one call at a time and without a deadline."""

    def __init__(self, reward: RewardCalls) -> None:
        self.reward = reward
        self._calling = threading.Lock()

    def run(self, calls: Sequence[Call], lost: LostTime) -> list[Outcome]:
        """Score the samples, in order."""
        del lost  # there is no deadline
        with self._calling:
            platform.use_local_device()
            return [outcome for job in self.reward.jobs(calls) for outcome in self.reward.run(job)]

    def close(self) -> None: ...


class ParallelReward:
    """A reward for batches of samples. Thread-safe. `close` ends its processes and threads.

    Args:
        num_workers: processes per component; 0: none; None: `pool.default_workers`
        fast: names of built-in functions to call in the calling thread
        timeout: of one call [s]
        patience: limit on the total time of timed-out calls in one rollout, while other ranks wait for this rank [s]
    """

    def __init__(
        self,
        reward: WeightedSum,
        *,
        num_workers: int | None,
        timeout: float,
        patience: float,
        fast: Sequence[str] = FAST,
    ) -> None:
        self.reward = reward
        self._timeout = timeout
        self._fast = fast
        self._patience = patience
        self._runners: list[Direct | ProcessPool | EventLoop] = [
            self._start(each, num_workers) for each in reward.components
        ]

    def _start(self, component: Component, num_workers: int | None) -> "Direct | ProcessPool | EventLoop":
        calls = RewardCalls(component.function, component.name, _where(component), self._timeout)
        if calls.is_async:
            from fsdptrain.rewards.local import EventLoop

            return EventLoop(calls)
        name = getattr(component.function, "__name__", "") if _is_ours(component.function) else ""
        if num_workers == 0 or name in self._fast:
            return Direct(calls)
        from fsdptrain.rewards.pool import CannotLoadError, ProcessPool, default_workers

        try:
            return ProcessPool(calls, num_workers or default_workers())
        except CannotLoadError as error:
            fix = "define it in a module that can be imported to run it in processes"
            line = "%s runs in the trainer, without --reward-timeout, because other processes cannot load it: %s; %s"
            log.warning(line, calls.where, error, fix)
            return Direct(calls)

    def close(self) -> None:
        """End all calls, including a `run` in another thread."""
        for runner in self._runners:
            runner.close()

    def check(self, prompts: Sequence[Prompt], *, call: bool) -> list[str]:
        """Check the signatures. With `call`, also call each custom reward on prompts and labels.

        Returns a line for each reward that scores no label. Raises ConfigError for a wrong signature or return type.
        """
        lines: list[str] = []
        for runner in self._runners:
            own = [prompt for prompt in prompts if runner.reward.name in self.reward.scorers(prompt)]
            for prompt in own or prompts:
                check_signature(runner.reward, prompt)
            if not call or not own or _is_ours(runner.reward.function):
                continue
            trials = [(prompt, "" if prompt.label is None else str(prompt.label)) for prompt in own]
            outcomes = runner.run(trials, LostTime(self._patience))
            reasons = [outcome for outcome in outcomes if isinstance(outcome, str)]
            for text in reasons:
                if WRONG in text and text.removeprefix("TypeError: ").startswith("the reward returned"):
                    raise ConfigError(f"{runner.reward.where}, called with labels as responses: {text}")
            if len(reasons) == len(outcomes):
                where = f"{runner.reward.where} scored none of {len(trials)} labels, passed as responses"
                lines.append(f"{where}: {reasons[0]}")
        return lines

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Score the samples, in order. The outcome of an unscored one is a string. Raises RolloutError, ConfigError."""
        lost = LostTime(self._patience)
        outcomes: list[Outcome] = [""] * len(calls)
        parts: dict[int, dict[str, RewardResult]] = {index: {} for index in range(len(calls))}
        scorers = [self.reward.scorers(prompt) for prompt, _ in calls]
        for runner in self._runners:
            name = runner.reward.name
            own = [index for index in parts if name in scorers[index]]
            for index, outcome in zip(own, runner.run([calls[index] for index in own], lost), strict=True):
                if isinstance(outcome, str):  # skip the remaining rewards
                    outcomes[index] = outcome
                    del parts[index]
                else:
                    parts[index][name] = outcome
        for index, results in parts.items():
            try:
                outcomes[index] = to_result(self.reward.combine(results))
            except ValueError as error:
                outcomes[index] = str(error)
        return outcomes


def _where(component: Component) -> str:
    """Return the reward for messages: `--reward module:function`."""
    function = RewardCalls(component.function).origin
    named = function if hasattr(function, "__qualname__") else type(function)
    if _is_ours(function) or (component.name and named is not component.function):
        return f"--reward {component.name}".strip()
    return f"--reward {named.__module__}:{named.__qualname__}"


def _is_ours(function: "RewardFunction") -> bool:
    return str(getattr(function, "__module__", "")).startswith("fsdptrain.rewards.")


def build_parallel(config: Config, reward: WeightedSum) -> ParallelReward:
    """Start the rewards with --reward-workers, --reward-timeout and the limit that --dist-timeout sets."""
    patience, workers = config.reward_patience, config.reward.reward_workers
    data = (config.data.prompt_data, *config.data.eval_prompt_data)
    is_compared = all(name.partition("?")[0].rpartition("=")[2] in COMPARED for name in data)
    return ParallelReward(
        reward,
        num_workers=workers,
        timeout=config.reward.reward_timeout or min(DEFAULT_TIMEOUT_S, patience / 3),
        patience=patience,
        fast=(*FAST, *GYM) if is_compared else FAST,
    )


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
