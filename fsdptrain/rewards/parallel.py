"""The rewards of a run: all samples of a rank at once."""

import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack

from fsdptrain.config import Config
from fsdptrain.cores import usable_cores
from fsdptrain.errors import ConfigError
from fsdptrain.protocols import RewardFunction
from fsdptrain.rewards.build import Component, WeightedSum
from fsdptrain.rewards.calls import Call, Outcome, RewardCalls, check_signature
from fsdptrain.rewards.functions import environment, exact, format_tags
from fsdptrain.rewards.local import EventLoop, InProcess
from fsdptrain.rewards.patience import Patience
from fsdptrain.rewards.pool import CannotLoadError, ProcessPool
from fsdptrain.rewards.values import WRONG, RewardResult, to_result
from fsdptrain.types import Prompt

log = logging.getLogger(__name__)

FAST = (environment, exact, format_tags)  # rewards that neither hang nor take longer than a message to a process
DEFAULT_TIMEOUT_S = 300.0
MAX_WORKERS = 8  # by default; each may import torch or load a model
Runner = ProcessPool | EventLoop | InProcess


class ParallelReward:
    """A reward for all samples of a rank at once. Close it to end its processes and threads.

    Args:
        num_workers: processes per component; 0: none
        timeout: of one call [s]
        patience: total time that hung calls and crashes of all components may take in one rollout, because other ranks
            wait for this rank [s]
    """

    def __init__(
        self, reward: RewardFunction | WeightedSum, *, num_workers: int, timeout: float, patience: float
    ) -> None:
        self.reward = reward
        self._timeout = timeout
        self._patience = Patience(patience)
        components = reward.components if isinstance(reward, WeightedSum) else (Component("", 1.0, reward),)
        self._runners: list[Runner] = []
        self._closed = False
        self._changed = threading.Condition()  # guards `_waiting` and `_is_running`
        self._waiting: list[tuple[Sequence[Call], Future[list[Outcome]]]] = []
        self._is_running = False
        with ExitStack() as stack:
            stack.callback(self.close)
            for component in components:
                self._runners.append(self._start(component, num_workers))
            stack.pop_all()

    def _start(self, component: Component, num_workers: int) -> Runner:
        calls = RewardCalls(component.function, component.name, _where(component), self._timeout)
        if calls.is_async:
            return EventLoop(calls)
        if not num_workers or component.function in FAST:
            return InProcess(calls)
        try:
            return ProcessPool(calls, num_workers)
        except CannotLoadError as error:
            return _without_processes(calls, error)

    def close(self) -> None:
        """End a `run` of another thread, too."""
        self._closed = True
        for runner in self._runners:
            runner.close()

    def check(self, prompts: Sequence[Prompt], *, call: bool) -> list[str]:
        """Check that the signatures allow the calls. With `call`, also call each reward of the user with `prompts[0]`.

        The response is empty. Returns a line for each reward that cannot score it. Raises ConfigError if a signature
        does not fit, or if a reward returns a value of a wrong type.
        """
        lines: list[str] = []
        for index, runner in enumerate(self._runners):
            for prompt in prompts:
                check_signature(runner.reward, prompt)
            if not call or not prompts or _is_ours(runner.reward.function):
                continue
            self._patience.begin()
            [outcome] = self._run(index, [(prompts[0], "")])
            if isinstance(outcome, str):
                line = f"{runner.reward.where}, called with the first row and an empty response: {outcome}"
                if WRONG in outcome and outcome.removeprefix("TypeError: ").startswith("the reward returned"):
                    raise ConfigError(line)
                lines.append(f"{line}; a response that cannot be scored is left out of training")
        return lines

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Score the samples, in order; a text says why a sample is unscored. Raises RolloutError.

        Any thread may call it. Samples of threads that wait meanwhile are scored together afterwards.
        """
        outcomes: Future[list[Outcome]] = Future()
        with self._changed:
            self._waiting.append((calls, outcomes))
            self._changed.wait_for(lambda: outcomes.done() or not self._is_running)
            if outcomes.done():
                return outcomes.result()
            self._is_running, together, self._waiting = True, self._waiting, []
        try:
            self._run_together(together)
        finally:
            with self._changed:
                self._is_running = False
                self._changed.notify_all()
        return outcomes.result()

    def _run_together(self, together: Sequence[tuple[Sequence[Call], Future[list[Outcome]]]]) -> None:
        try:
            found = iter(self._run_all([call for calls, _ in together for call in calls]))
        except BaseException as error:  # noqa: BLE001  # each thread raises it
            for _, outcomes in together:
                outcomes.set_exception(error)
        else:
            for calls, outcomes in together:
                outcomes.set_result([next(found) for _ in calls])

    def _run_all(self, calls: Sequence[Call]) -> list[Outcome]:
        self._patience.begin()
        outcomes: list[Outcome] = [""] * len(calls)
        parts: dict[int, list[RewardResult]] = {index: [] for index in range(len(calls))}
        for runner in range(len(self._runners)):
            for index, outcome in zip([*parts], self._run(runner, [calls[index] for index in parts]), strict=True):
                if isinstance(outcome, str):  # other rewards need not score it
                    outcomes[index] = outcome
                    del parts[index]
                else:
                    parts[index].append(outcome)
        for index, results in parts.items():
            outcomes[index] = self._combine(results)
        return outcomes

    def _run(self, index: int, calls: Sequence[Call]) -> list[Outcome]:
        runner = self._runners[index]
        self._patience.answered()
        if runner.reward.function in FAST:
            return [outcome for call in calls for outcome in runner.reward.run([call])]
        try:
            return runner.run(calls, self._patience)
        except CannotLoadError as error:
            runner.close()
            self._runners[index] = runner = _without_processes(runner.reward, error)
            if self._closed:  # meanwhile
                runner.close()
            return runner.run(calls, self._patience)

    def _combine(self, results: Sequence[RewardResult]) -> Outcome:
        if not isinstance(self.reward, WeightedSum):
            return results[0]
        try:
            return to_result(self.reward.combine(results))
        except ValueError as error:
            return str(error)


def _without_processes(calls: RewardCalls, error: CannotLoadError) -> InProcess:
    fix = "define it in a module that can be imported to run it in processes"
    line = "%s runs in the trainer's process, one call at a time, because no other process can load it: %s; %s"
    log.warning(line, calls.where, error, fix)
    return InProcess(calls)


def _where(component: Component) -> str:
    """Return the reward for messages: `--reward module:function`."""
    function = component.function
    qualified = getattr(function, "__qualname__", None)
    if _is_ours(function) or qualified is None:
        return f"--reward {component.name}".strip()
    return f"--reward {function.__module__}:{qualified}"


def _is_ours(function: RewardFunction) -> bool:
    return str(getattr(function, "__module__", "")).startswith("fsdptrain.rewards.")


def build_parallel(config: Config, reward: RewardFunction | WeightedSum) -> ParallelReward:
    """Start the rewards of a run with --reward-workers, --reward-timeout and the patience of --dist-timeout."""
    patience, workers = config.reward_patience, config.reward.reward_workers
    return ParallelReward(
        reward,
        num_workers=default_workers() if workers is None else workers,
        timeout=config.reward.reward_timeout or min(DEFAULT_TIMEOUT_S, patience / 3),
        patience=patience,
    )


def default_workers() -> int:
    """Return the number of cores of this rank: those of the machine divided by its ranks; 1 to `MAX_WORKERS`."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(usable_cores() // ranks, MAX_WORKERS))
