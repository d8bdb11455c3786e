"""From `--environment` to what answers the model."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fsdptrain import registry
from fsdptrain.config import EnvironmentConfig
from fsdptrain.errors import ConfigError
from fsdptrain.protocols import Environment
from fsdptrain.types import Prompt, Turn

FLAG = "--environment"
ENVIRONMENTS: Mapping[str, Callable[..., Environment]] = {}  # all come from the user or a plug-in

OPTIONAL: Mapping[str, Any] = {"finish": None, "dataset": None, "system_prompt": None, "tools": ()}
"""What an environment may have besides `reset` and `step`, and what stands for it in one that has not."""

Reward = float | Mapping[str, float] | None


@dataclass(frozen=True)
class LoadedEnvironment:
    """An environment, and what it has besides `reset` and `step`."""

    environment: Environment
    finish: Callable[[Any], Reward] | None  # after the last turn, whatever ended it: a last reward; frees the state
    dataset: Callable[[], Sequence[Mapping[str, Any]]] | None  # prompt, label, metadata: --prompt-data environment
    system_prompt: str | None  # for --system-prompt auto
    tools: Sequence[Any]  # JSON schemas, handed to the chat template


def build_environment(config: EnvironmentConfig) -> LoadedEnvironment | None:
    """The environment that `config` names, made with its --environment-kwargs; None if it names none.

    A class is made into one object, a function `(prompt, responses) -> Turn` is an environment without a state. Raises
    ConfigError for what is neither, and for arguments that it does not take.
    """
    if config.environment is None:
        return None
    made = _make(config.environment, config.environment_kwargs)
    for method in ("reset", "step"):
        if not callable(getattr(made, method, None)):
            raise ConfigError(
                f"{FLAG} {config.environment} has no method {method}: it is a class with reset and step, or a function "
                "(prompt, responses) -> Turn"
            )
    found = {name: getattr(made, name, without) for name, without in OPTIONAL.items()}
    for method in ("finish", "dataset"):
        if found[method] is not None and not callable(found[method]):
            raise ConfigError(f"{FLAG} {config.environment}: {method} must be a method, got {found[method]!r:.80}")
    return LoadedEnvironment(made, **found)


def _make(name: str, kwargs: Mapping[str, Any]) -> Any:
    found = _find(name)
    try:
        if inspect.isfunction(found):
            inspect.signature(found).bind(None, [], **kwargs)
            return FunctionEnvironment(partial(found, **kwargs))
        inspect.signature(found).bind(**kwargs)  # TypeError too for an object that cannot be called
    except TypeError as error:
        raise ConfigError(f"{FLAG} {name} cannot be made with --environment-kwargs {dict(kwargs)}: {error}") from error
    return found(**kwargs)


def _find(name: str) -> Any:
    return registry.resolve(name, ENVIRONMENTS, flag=FLAG, plugins="environments")


@dataclass
class FunctionEnvironment:
    """A function of the prompt and of all responses so far: an environment without a state of its own."""

    function: Callable[[Prompt, Sequence[str]], Turn]

    @dataclass
    class State:
        prompt: Prompt
        responses: list[str] = field(default_factory=list)

    def reset(self, prompt: Prompt, seed: int) -> State:
        del seed  # who needs one writes a class
        return self.State(prompt)

    def step(self, state: State, response: str) -> Turn:
        state.responses.append(response)
        return self.function(state.prompt, tuple(state.responses))
