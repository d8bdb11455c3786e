"""Load the environment selected by `--environment`."""

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from transformers.utils import get_json_schema

from fsdptrain import registry
from fsdptrain.config import Config, EnvironmentConfig
from fsdptrain.errors import ConfigError
from fsdptrain.protocols import Environment
from fsdptrain.types import Prompt

FLAG = "--environment"

Reward = float | Mapping[str, float] | None


@dataclass(frozen=True)
class Agent:
    """A program that calls the model itself: an async function (client, prompt) -> reward, or a command."""

    function: Callable[[Any, Prompt], Awaitable[Reward]] | None
    command: str = ""


@dataclass(frozen=True)
class LoadedEnvironment:
    """An environment or an agent, and its optional attributes."""

    environment: Environment | Agent
    finish: Callable[[Any], Reward] | None = None  # after the last turn, also on errors: final reward, frees the state
    dataset: Callable[[], Sequence[Mapping[str, Any]]] | None = None  # prompt, label, metadata per row
    system_prompt: str | None = None  # for --system-prompt auto
    tools: Sequence[Any] = ()  # JSON schemas, passed to the chat template

    @property
    def is_agent(self) -> bool:
        return isinstance(self.environment, Agent)

    def values_for(self, config: Config) -> dict[str, Any]:
        """Return the options that it sets: its system prompt, unless the user has set one, and its tools."""
        if self.is_agent and config.data.system_prompt not in ("auto", ""):
            raise ConfigError("--system-prompt has no effect on an agent, which writes its own messages: put it there")
        values: dict[str, Any] = {}
        if self.system_prompt is not None and config.data.system_prompt == "auto":
            values["system_prompt"] = self.system_prompt
        if self.tools and config.data.apply_chat_template:
            schemas = [get_json_schema(tool) if callable(tool) else tool for tool in self.tools]
            try:
                tools = json.loads(json.dumps(schemas))
            except TypeError as error:
                name = config.environment.environment
                raise ConfigError(f"--environment {name}: its tools must be JSON schemas: {error}") from error
            values["chat_template_kwargs"] = {**config.data.chat_template_kwargs, "tools": tools}
        return values


def build_environment(config: EnvironmentConfig) -> LoadedEnvironment | None:
    """Build the environment named in `config` with its --environment-kwargs. None if no environment is named.

    A class is instantiated once. An async function `(client, prompt)` is an agent.

    Raises ConfigError for any other object, and for arguments that it does not accept.
    """
    if config.environment_command is not None:
        return LoadedEnvironment(Agent(None, config.environment_command))
    if config.environment is None:
        return None
    made = _make(config.environment, config.environment_kwargs)
    if isinstance(made, Agent):
        return LoadedEnvironment(made)
    for method in ("reset", "step"):
        if not callable(getattr(made, method, None)):
            raise ConfigError(
                f"{FLAG} {config.environment} has no method {method}: it is a class with reset and step, or an async "
                "function (client, prompt) -> reward"
            )
    optional = [each for each in fields(LoadedEnvironment) if each.name != "environment"]
    found: dict[str, Any] = {each.name: getattr(made, each.name, each.default) for each in optional}
    for method in ("finish", "dataset"):
        if found[method] is not None and not callable(found[method]):
            raise ConfigError(f"{FLAG} {config.environment}: {method} must be a method, got {found[method]!r:.80}")
    return LoadedEnvironment(made, **found)


def _make(name: str, kwargs: Mapping[str, Any]) -> Any:
    found = find_environment(name)
    try:
        if inspect.iscoroutinefunction(found):
            inspect.signature(found).bind("client", None, **kwargs)
            return Agent(partial(found, **kwargs))
        inspect.signature(found).bind(**kwargs)  # also raises TypeError if `found` is not callable
    except TypeError as error:
        raise ConfigError(f"{FLAG} {name} cannot be made with --environment-kwargs {dict(kwargs)}: {error}") from error
    return found(**kwargs)


def find_environment(name: str) -> Any:
    """Return the class or function that --environment names, without making an environment. Raises ConfigError."""
    return registry.resolve(name, {}, flag=FLAG, plugins="environments")
