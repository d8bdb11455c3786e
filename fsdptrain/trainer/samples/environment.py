"""Load what `--environment` names: an environment, an agent, or with `--environment-key` several environments."""

import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from fsdptrain import registry
from fsdptrain.config import Config, EnvironmentConfig
from fsdptrain.data.prompts import check_template
from fsdptrain.data.rows import Row, Rows
from fsdptrain.data.tables import value_in
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.protocols import Environment
from fsdptrain.rewards.values import RewardResult
from fsdptrain.types import Prompt, Turn

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

    environment: "Environment | Agent | Mixture"
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
                name = " ".join(config.environment.environment)
                raise ConfigError(f"--environment {name}: its tools must be JSON schemas: {error}") from error
            values["chat_template_kwargs"] = {**config.data.chat_template_kwargs, "tools": tools}
        return values

    def of(self, prompt: Prompt) -> "LoadedEnvironment":
        """Return the environment of a row."""
        mixture = self.environment
        if not isinstance(mixture, Mixture):
            return self
        return mixture.environments[name_in(prompt.metadata, prompt.id, mixture.key, mixture.environments)]

    def rows_of(self, rows: Rows, config: Config, tokenizer: PreTrainedTokenizerBase) -> Rows:
        """Return the rows with the options of their environments. Reading a row checks the name of its environment."""
        if not isinstance(self.environment, Mixture):
            return rows
        options = {name: each.values_for(config) for name, each in self.environment.environments.items()}
        for values in options.values():
            check_template(tokenizer, config.data.model_copy(update=values))
        return _MixtureRows(rows, self.environment.key, options)


@dataclass(frozen=True)
class Mixture:
    """Environments by name. The column `key`, --environment-key, names that of a row; "" is a single turn."""

    key: str
    environments: Mapping[str, LoadedEnvironment]

    def tagged(self, result: RewardResult, prompt: Prompt) -> RewardResult:
        """Return the result with the reward once more under the name of the environment, for metrics."""
        tag = f"environment/{name_in(prompt.metadata, prompt.id, self.key, self.environments) or 'single_turn'}"
        return result if result.reward is None else replace(result, rewards={**result.rewards, tag: result.reward})


@dataclass(frozen=True)
class _MixtureRows:
    rows: Rows
    key: str
    options: Mapping[str, Mapping[str, Any]]  # of prompts, by environment

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Row:
        row = self.rows[index]
        return replace(row, options=self.options[name_in(row.metadata, row.id, self.key, self.options)])


class _SingleTurn:
    def reset(self, prompt: Prompt, seed: int) -> None: ...

    def step(self, state: None, response: str) -> Turn:
        return Turn(done=True)


def name_in(metadata: Mapping[str, Any], row_id: str, key: str | None, names: Iterable[str]) -> str:
    """Return the name of the environment of a row; "" for a single turn. Raises DataError if it is not in `names`."""
    name: Any = None if key is None else value_in(metadata, key)
    if name in (None, ""):
        return ""
    if name not in [*names]:
        known = ", ".join(filter(None, names))
        raise DataError(f"--environment-key {key}: row {row_id} has {name!r:.80}, --environment has {known}")
    return name


def short_names(config: EnvironmentConfig) -> dict[str, str]:
    """Return --environment by name: what follows the colon, or all of it if several end alike."""
    ends = [path.rpartition(":")[2] for path in config.environment]
    return {end if ends.count(end) == 1 else path: path for end, path in zip(ends, config.environment, strict=True)}


def build_environment(config: EnvironmentConfig, key: str | None = None) -> LoadedEnvironment | None:
    """Build the environment named in `config` with its --environment-kwargs. None if no environment is named.

    A class is instantiated once. An async function `(client, prompt)` is an agent. key: --environment-key.

    Raises ConfigError for any other object, and for arguments that it does not accept.
    """
    if config.environment_command is not None:
        return LoadedEnvironment(Agent(None, config.environment_command))
    if key is None:
        return _load(config.environment[0], config.environment_kwargs) if config.environment else None
    paths, arguments = short_names(config), config.environment_kwargs
    if wrong := [name for name in arguments if name not in paths or not isinstance(arguments[name], Mapping)]:
        names = f"{', '.join(paths)} with --environment-key"
        raise ConfigError(f"--environment-kwargs {wrong[0]}: it is NAME='{{argument: value}}' of {names}")
    loaded = {name: _load(path, arguments.get(name, {})) for name, path in paths.items()}
    if agents := [name for name, each in loaded.items() if each.is_agent]:
        raise ConfigError(f"--environment {agents[0]}: an agent cannot be one of multiple environments: run it alone")
    return LoadedEnvironment(Mixture(key, {"": LoadedEnvironment(_SingleTurn()), **loaded}))


def _load(name: str, kwargs: Mapping[str, Any]) -> LoadedEnvironment:
    made = _make(name, kwargs)
    if isinstance(made, Agent):
        return LoadedEnvironment(made)
    for method in ("reset", "step"):
        if not callable(getattr(made, method, None)):
            raise ConfigError(
                f"{FLAG} {name} has no method {method}: it is a class with reset and step, or an async "
                "function (client, prompt) -> reward"
            )
    optional = [each for each in fields(LoadedEnvironment) if each.name != "environment"]
    found: dict[str, Any] = {each.name: getattr(made, each.name, each.default) for each in optional}
    for method in ("finish", "dataset"):
        if found[method] is not None and not callable(found[method]):
            raise ConfigError(f"{FLAG} {name}: {method} must be a method, got {found[method]!r:.80}")
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
