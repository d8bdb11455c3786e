"""The rewards of a run: all samples of a rank at once."""

import logging
import os
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from typing import TYPE_CHECKING

from fsdptrain.config import Config
from fsdptrain.cores import usable_cores
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.protocols import RewardFunction
from fsdptrain.rewards.build import Component, WeightedSum
from fsdptrain.rewards.calls import Call, Outcome, RewardCalls, check_signature
from fsdptrain.rewards.functions import environment, exact, format_tags
from fsdptrain.rewards.values import WRONG, RewardResult, to_result
from fsdptrain.types import Prompt

if TYPE_CHECKING:
    from fsdptrain.rewards.local import EventLoop, InThread
    from fsdptrain.rewards.pool import ProcessPool

    Runner = ProcessPool | EventLoop | InThread

log = logging.getLogger(__name__)

FAST = (environment, exact, format_tags)  # rewards that neither hang nor take longer than a message to a process
DEFAULT_TIMEOUT_S = 300.0
MAX_WORKERS = 8  # by default; each may import torch or load a model


class LostTime:
    """Time of one rollout that late calls have taken: of a call in one of eight processes, an eighth of its timeout."""

    def __init__(self, limit: float) -> None:
        self.limit = limit  # for all rewards of a rank [s]
        self.seconds, self.num_calls = 0.0, 0

    def add(self, reason: str, seconds: float) -> None:
        """Count a late call. Raises RolloutError if the rollout has lost too much."""
        self.seconds, self.num_calls = self.seconds + seconds, self.num_calls + 1
        if self.seconds >= self.limit:
            raise RolloutError(
                f"--reward: {self.num_calls} late calls in one rollout took {self.seconds:.0f} s, and other ranks wait "
                f"no longer than {self.limit:g} s for that; last: {reason}; give it its own time limit, lower "
                "--reward-timeout, or raise --dist-timeout"
            )


class ParallelReward:
    """A reward for all samples of a rank at once, from any thread. Close it to end its processes and threads.

    Args:
        num_workers: processes per component; 0: none
        timeout: of one call [s]
        patience: total time that late calls of all components may take in one rollout, because other ranks wait for
            this rank [s]
    """

    def __init__(
        self, reward: RewardFunction | WeightedSum, *, num_workers: int, timeout: float, patience: float
    ) -> None:
        self.reward = reward
        self._timeout = timeout
        self._patience = patience
        components = reward.components if isinstance(reward, WeightedSum) else (Component("", 1.0, reward),)
        self._runners: list[Runner] = []
        with ExitStack() as stack:
            stack.callback(self.close)
            for component in components:
                self._runners.append(self._start(component, num_workers))
            stack.pop_all()

    def _start(self, component: Component, num_workers: int) -> "Runner":
        calls = RewardCalls(component.function, component.name, _where(component), self._timeout)
        if calls.is_async or not num_workers or component.function in FAST:
            from fsdptrain.rewards.local import EventLoop, InThread

            return EventLoop(calls) if calls.is_async else InThread(calls)
        from fsdptrain.rewards.pool import CannotLoadError, ProcessPool

        try:
            return ProcessPool(calls, num_workers)
        except CannotLoadError as error:
            fix = "define it in a module that can be imported to run it in processes"
            line = "%s runs in the trainer's process, one call at a time, because no other process can load it: %s; %s"
            log.warning(line, calls.where, error, fix)
            from fsdptrain.rewards.local import InThread

            return InThread(calls)

    def close(self) -> None:
        """End a `run` of another thread, too."""
        for runner in self._runners:
            runner.close()

    def check(self, prompts: Sequence[Prompt], *, call: bool) -> list[str]:
        """Check that the signatures allow the calls. With `call`, also call each reward of the user with `prompts[0]`.

        The response is empty. Returns a line for each reward that cannot score it. Raises ConfigError if a signature
        does not fit, or if a reward returns a value of a wrong type.
        """
        lines: list[str] = []
        for runner in self._runners:
            for prompt in prompts:
                check_signature(runner.reward, prompt)
            if not call or not prompts or _is_ours(runner.reward.function):
                continue
            [outcome] = _run(runner, [(prompts[0], "")], LostTime(self._patience))
            if isinstance(outcome, str):
                line = f"{runner.reward.where}, called with the first row and an empty response: {outcome}"
                if WRONG in outcome and outcome.removeprefix("TypeError: ").startswith("the reward returned"):
                    raise ConfigError(line)
                lines.append(f"{line}; a response that cannot be scored is left out of training")
        return lines

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Score the samples, in order; a text says why a sample is unscored. Raises RolloutError."""
        lost = LostTime(self._patience)
        outcomes: list[Outcome] = [""] * len(calls)
        parts: dict[int, list[RewardResult]] = {index: [] for index in range(len(calls))}
        for runner in self._runners:
            for index, outcome in zip([*parts], _run(runner, [calls[index] for index in parts], lost), strict=True):
                if isinstance(outcome, str):  # other rewards need not score it
                    outcomes[index] = outcome
                    del parts[index]
                else:
                    parts[index].append(outcome)
        for index, results in parts.items():
            outcomes[index] = self._combine(results)
        return outcomes

    def _combine(self, results: Sequence[RewardResult]) -> Outcome:
        if not isinstance(self.reward, WeightedSum):
            return results[0]
        try:
            return to_result(self.reward.combine(results))
        except ValueError as error:
            return str(error)


def _run(runner: "Runner", calls: Sequence[Call], lost: LostTime) -> list[Outcome]:
    """Score the samples by one reward, in order."""
    if runner.reward.function in FAST:
        return [outcome for call in calls for outcome in runner.reward.run([call])]
    outcomes: dict[int, Outcome] = {}
    for job, scored in _finished(runner, calls):
        outcomes |= zip(job, scored, strict=True)
        if scored[0] == runner.reward.late:
            lost.add(f"{scored[0]} (prompt {calls[job[0]][0].id!r})", runner.reward.timeout / runner.num_calls)
    return [outcomes[index] for index in range(len(calls))]


def _finished(runner: "Runner", calls: Sequence[Call]) -> Iterator[tuple[list[int], list[Outcome]]]:
    """Start all calls. Yields the indices and the outcomes of the samples of each, as they finish."""
    pending: dict[Future[list[Outcome]], list[int]] = {}
    finished: queue.SimpleQueue[Future[list[Outcome]]] = queue.SimpleQueue()
    for job in runner.reward.jobs(range(len(calls))):
        future = runner.schedule([calls[index] for index in job])
        if future.done():
            yield job, future.result()
        else:
            pending[future] = job
            future.add_done_callback(finished.put)
    while pending:
        try:
            future = finished.get(timeout=runner.reward.timeout + runner.grace)
            yield pending.pop(future), future.result()
        except queue.Empty:  # an async call blocks its event loop, or no process starts
            runner.abandon()
            for job in pending.values():
                yield job, [runner.reward.late] * len(job)
            return
        except CancelledError as error:
            raise RolloutError(f"{runner.reward.where}: the run has ended") from error


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
