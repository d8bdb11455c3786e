"""How a reward function is called. No torch: reward workers import this module.

| signature | call |
|---|---|
| `f(prompt, response)` | one sample, a `Prompt` and a text |
| `async def f(prompt, response)` | one sample; up to `MAX_CONCURRENT` calls run at the same time |
| `f(prompts, responses)` | lists of all samples of a rank; returns a list of the same length |
| `f(prompts, completions, **columns)` | the same with the keyword arguments of TRL's GRPOTrainer |

The names `responses` and `completions` select the last two; they may be async too.
"""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from fsdptrain.errors import ConfigError, RewardError, describe
from fsdptrain.rewards.values import RewardResult, to_result
from fsdptrain.types import Prompt

Kind = Literal["sample", "async", "batch", "columns"]
Outcome = RewardResult | str  # a score, or why the sample is unscored
Reply = Callable[[int, Outcome], object]  # of the sample at an index
MAX_CONCURRENT = 64  # async calls


class WrongValue(str):
    """Reason of an unscored sample for which the reward returned a value of a wrong type or length."""


@dataclass(frozen=True)
class RewardCalls:
    """A reward function and the way to call it. Picklable if the function is."""

    function: Callable[..., Any]
    name: str  # key of a number in `RewardResult.rewards`
    timeout: float  # of one async call [s]
    kind: Kind = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", kind_of(self.function))

    def check(self, prompt: Prompt, *, where: str) -> None:
        """Raise ConfigError if the signature does not allow the calls. prompt: of the first row."""
        try:
            signature = inspect.signature(self.function)
        except ValueError:  # some functions in C have none
            return
        except TypeError as error:
            raise ConfigError(f"{where} is not a function") from error
        try:
            if self.kind == "columns":
                signature.bind(**self._columns([prompt], [""]))
            else:
                signature.bind("prompt", "response")
        except TypeError as error:
            columns = f"; the data has the columns {', '.join(prompt.metadata)}" if self.kind == "columns" else ""
            raise ConfigError(
                f"{where} takes {signature}, which does not fit its calls: {error}{columns}; write "
                "f(prompt, response), or f(prompts, responses) for lists"
            ) from error

    def close(self) -> None:
        if "_loop" in vars(self):
            self._loop.close()

    def run(self, calls: Sequence[tuple[Prompt, str]], reply: Reply) -> None:
        """Score all `calls` and reply for each."""
        if self.kind == "sample":
            for index, (prompt, response) in enumerate(calls):
                reply(index, attempt(self.function, prompt, response, name=self.name))
        elif self.kind == "async":
            self._loop.run_until_complete(self._run_async(calls, reply))
        else:
            for index, outcome in enumerate(self._run_batch(calls)):
                reply(index, outcome)

    async def _run_async(self, calls: Sequence[tuple[Prompt, str]], reply: Reply) -> None:
        free = asyncio.Semaphore(MAX_CONCURRENT)

        async def result(prompt: Prompt, response: str) -> Outcome:
            try:
                return _outcome(await self.function(prompt, response), self.name)
            except (Exception, SystemExit) as error:  # noqa: BLE001  # user code may raise anything
                return _reason(error)

        async def score(index: int, prompt: Prompt, response: str) -> None:
            async with free:
                task = asyncio.create_task(result(prompt, response))
                done, _ = await asyncio.wait({task}, timeout=self.timeout)
                task.cancel()  # if it is late; not awaited, because it may catch the CancelledError
            reply(index, task.result() if done else no_answer(self.timeout))

        await asyncio.gather(*(score(index, *call) for index, call in enumerate(calls)))

    def _run_batch(self, calls: Sequence[tuple[Prompt, str]]) -> list[Outcome]:
        prompts, responses = [prompt for prompt, _ in calls], [response for _, response in calls]
        try:
            if self.kind == "columns":
                values = self.function(**self._columns(prompts, responses))
            else:
                values = self.function(prompts, responses)
            if inspect.isawaitable(values):
                values = self._loop.run_until_complete(_awaited(values))
            if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != len(calls):
                found = f"{len(values)} values" if isinstance(values, list | tuple) else f"{values!r:.80}"
                reason = f"the reward returned {found} for {len(calls)} samples; it must return a list with one each"
                return [WrongValue(reason)] * len(calls)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # user code may raise anything
            return [_reason(error)] * len(calls)
        return [
            attempt(lambda *_, value=value: value, *call, name=self.name)
            for value, call in zip(values, calls, strict=True)
        ]

    def _columns(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> dict[str, Any]:
        """Return the keyword arguments of TRL: messages if the column `prompt` holds messages, else texts."""
        originals = [prompt.metadata.get("prompt", prompt.text) for prompt in prompts]
        is_chat = isinstance(originals[0], list)
        given = {
            **{name: [prompt.metadata.get(name) for prompt in prompts] for name in prompts[0].metadata},
            "prompts": originals,
            "completions": [[{"role": "assistant", "content": text}] if is_chat else text for text in responses],
        }
        given.pop("prompt", None)
        parameters = inspect.signature(self.function).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        return given if takes_all else {name: value for name, value in given.items() if name in parameters}

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of all calls: an HTTP client of the user belongs to one loop."""
        return asyncio.new_event_loop()


def kind_of(function: Callable[..., Any]) -> Kind:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return "sample"
    if "completions" in parameters:
        return "columns"
    if "responses" in parameters:
        return "batch"
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return "async" if is_async else "sample"


def attempt(function: Callable[..., Any], prompt: Prompt, response: str, *, name: str = "") -> Outcome:
    """Score one response. Return why the sample is unscored if the reward raises or returns no finite number."""
    try:
        return _outcome(function(prompt, response), name)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # user code may raise anything; the run continues
        return _reason(error)


def no_answer(timeout: float) -> str:
    return f"--reward: no answer within --reward-timeout {timeout:g} s"


def _outcome(value: Any, name: str) -> Outcome:
    try:
        result = to_result(value, name=name)
    except TypeError as error:
        return WrongValue(describe(error))
    if result.reward is None:
        return f"{name} returned None, which means that it cannot score this" if name else "the reward returned None"
    return result


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, RewardError) else describe(error)


async def _awaited(value: Any) -> Any:
    return await value
