"""How a reward function is called. No torch: reward workers import this module.

| signature | call |
|---|---|
| `f(prompt, response)` | one sample, a `Prompt` and a text |
| `f(prompts, responses)` | lists of all samples of a rank; returns a list of the same length |
| `f(prompts, completions, **columns)` | the same with the keyword arguments of TRL's GRPOTrainer |

The names `responses` and `completions` select the last two. All may be async.
"""

import inspect
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from fsdptrain.errors import ConfigError, RewardError, RolloutError, describe
from fsdptrain.registry import check_call
from fsdptrain.rewards.values import RewardResult, to_result
from fsdptrain.types import Prompt

Outcome = RewardResult | str  # a score, or why the sample is unscored
Call = tuple[Prompt, str]  # prompt and response


@dataclass(frozen=True)
class RewardCalls:
    """A reward function and the way to call it. Picklable if the function is."""

    function: Callable[..., Any]
    name: str = ""  # key of a number in `RewardResult.rewards`
    where: str = "--reward"  # in messages, e.g. "--reward math"
    timeout: float = 300.0  # of one call [s]

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        try:
            return tuple(inspect.signature(self.function).parameters)
        except (TypeError, ValueError):  # no function, or one in C
            return ()

    @property
    def origin(self) -> Any:
        """The function itself, of a partial the one that it calls."""
        return self.function.func if isinstance(self.function, partial) else self.function

    @property
    def place(self) -> str:
        """File and line of the function, for messages."""
        function = inspect.unwrap(self.origin if inspect.isroutine(self.origin) else type(self.origin).__call__)
        code = getattr(function, "__code__", None)
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else self.where

    @property
    def is_async(self) -> bool:
        instance = callable(self.origin) and type(self.origin).__call__
        return inspect.iscoroutinefunction(self.origin) or inspect.iscoroutinefunction(instance)

    @property
    def is_batched(self) -> bool:
        return "responses" in self.parameters or "completions" in self.parameters

    def jobs(self, calls: Sequence[Call]) -> list[list[Call]]:
        """Split samples into calls of the function: one each, or all in one."""
        return [[*calls]] * bool(calls) if self.is_batched else [[call] for call in calls]

    def arguments(self, calls: Sequence[Call]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return positional and keyword arguments of the call that scores `calls`."""
        prompts, responses = [prompt for prompt, _ in calls], [response for _, response in calls]
        if "completions" in self.parameters:
            from fsdptrain.rewards.batched import columns

            return (), columns(self.function, prompts, responses)
        return ((prompts, responses) if self.is_batched else calls[0]), {}

    @property
    def late(self) -> str:
        """Why a sample is unscored whose call was late."""
        return f"{self.where}: no answer within --reward-timeout {self.timeout:g} s"

    def call(self, calls: Sequence[Call]) -> Any:
        args, kwargs = self.arguments(calls)
        return self.function(*args, **kwargs)

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Score one sample, or all of a batched reward."""
        try:
            value = self.call(calls)
        except (Exception, SystemExit, CancelledError) as error:  # noqa: BLE001  # user code may raise anything; the run continues
            return [reason(error)] * len(calls)
        return self.outcomes(value, len(calls))

    def outcomes(self, value: Any, num_samples: int) -> list[Outcome]:
        """Convert the value of a call."""
        if not self.is_batched:
            return [self._outcome(value)]
        from fsdptrain.rewards.batched import values_of

        values = values_of(value, num_samples, place=self.place)
        return [values] * num_samples if isinstance(values, str) else [self._outcome(each) for each in values]

    def _outcome(self, value: Any) -> Outcome:
        try:
            result = to_result(value, name=self.name)
        except Exception as error:  # noqa: BLE001  # objects of the user
            return describe(error, at=self.place)
        if result.reward is not None:
            return result
        return f"{self.name or 'the reward'} returned None, which means that it cannot score this ({self.place})"


class LostTime:
    """Time of one rollout that late calls have taken: of a call in one of eight processes, an eighth of its timeout."""

    def __init__(self, limit: float) -> None:
        self.limit = limit  # for all rewards of a rank [s]
        self.seconds, self.num_calls = 0.0, 0

    def add(self, reward: RewardCalls, outcome: Outcome, call: Call, *, num_calls: int = 1) -> None:
        """Count a call if it was late, one of `num_calls` at a time. Raises RolloutError if too much time is lost."""
        if outcome != reward.late:
            return
        self.seconds, self.num_calls = self.seconds + reward.timeout / num_calls, self.num_calls + 1
        if self.seconds >= self.limit:
            raise RolloutError(
                f"--reward: {self.num_calls} timed-out calls in one rollout took {self.seconds:.0f} s, and other ranks "
                f"wait no longer than {self.limit:g} s for that; last: {reward.late} (prompt {call[0].id!r}); give it "
                "a time limit, lower --reward-timeout, or raise --dist-timeout"
            )


def reason(error: BaseException) -> str:
    """Return why a call that raised left its samples unscored."""
    return str(error) if isinstance(error, RewardError) else describe(error)


def check_signature(reward: RewardCalls, prompt: Prompt) -> None:
    """Raise ConfigError if the function cannot be called for a sample of `prompt`."""
    args, kwargs = reward.arguments([(prompt, "")])
    try:
        check_call(reward.function, lambda f: f(*args, **kwargs), where=reward.where)
    except ConfigError as error:
        columns = f"; the data has the columns {', '.join(prompt.metadata)}" if kwargs else ""
        fix = "write f(prompt, response), or f(prompts, responses) for lists"
        raise ConfigError(f"{error}{columns}; {fix}") from error
