"""Objects that `Trainer` gets in place of names, and the configuration that names them."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fsdptrain.config import Config, DataConfig
from fsdptrain.config.keys import all_keys
from fsdptrain.config.other_names import advice
from fsdptrain.config.presets import preset_values
from fsdptrain.data.sources import FROM_PYTHON
from fsdptrain.errors import ConfigError

_ARGUMENTS = {"advantage_estimator": "advantage", "rollout_engine": "engine"}  # of `Trainer`, by option


def wrong_arguments(config: Any, unknown: Mapping[str, Any], **data: Any) -> ConfigError:
    """Return the error of a Trainer(...) call without a Config, with unknown keywords, or with names as data."""
    problems = [f"Trainer({name}=...) is unknown{_advice(name)}" for name in unknown]
    for name, given in data.items():
        if isinstance(given, str | os.PathLike):
            flag = "--eval-prompt-data" if name == "eval_dataset" else "--prompt-data"
            problems.append(f"Trainer({name}={str(given)!r}) takes rows, not a name: give it to Config by {flag}")
    if not isinstance(config, Config):
        shown = f", got {config!r:.80}" if config is not None else ""
        problems.append(f"Trainer takes a Config first{shown}: Trainer(Config(hf_checkpoint='Qwen/Qwen3-4B'), ...)")
    return ConfigError(*problems)


def _advice(name: str) -> str:
    """Return where an unknown argument of `Trainer` belongs."""
    if here := {"reward_funcs": "reward", "train_dataset": "dataset", "reward_fn": "reward"}.get(name):
        return f": it is {here} here"
    if name in all_keys():
        return ": it is an option, Config takes it"
    arguments = ["reward", "dataset", "eval_dataset", "environment", "loss", "advantage", "engine", "optimizer"]
    return advice(name, [*arguments, "callbacks"])


def config_naming(
    config: Config, objects: Mapping[str, Any], dataset: Any, eval_dataset: Any
) -> tuple[Config, dict[str, Any]]:
    """Return the config that names the objects, by option, and has the data; and the objects by these names."""
    methods = {"environment": ("reset", "step"), "rollout_engine": ("generate", "update_weights")}
    given = {
        flat: _constructor(instance, methods[flat]) if flat in methods else instance
        for flat, instance in objects.items()
        if instance is not None
    }
    config = _with_paths(config, given)
    config = config if dataset is None else _with_rows(config)
    config = config if eval_dataset is None else _with_evaluation_rows(config)
    return config, {path_of(instance): instance for instance in given.values()}


def _constructor(given: Any, methods: Sequence[str]) -> Any:
    """Return a function that returns `given`, if it is an instance with these methods and not a class or function."""
    if isinstance(given, type) or not all(hasattr(given, name) for name in methods):
        return given

    def constructor(*_: Any, **__: Any) -> Any:
        return given

    constructor.__module__, constructor.__qualname__ = type(given).__module__, type(given).__qualname__
    return constructor


def _with_paths(config: Config, given: Mapping[str, Any]) -> Config:
    """Return `config` with the paths of the `given` objects as values, checked again."""
    if not given:
        return config
    for flat in given:
        if config.is_set(flat):
            argument = _ARGUMENTS.get(flat, flat)
            flag = all_keys()[flat].flag
            raise ConfigError(f"{flag} {config.value(flat)} and Trainer({argument}=...) are both given: choose one")
    paths = {flat: path_of(found) for flat, found in given.items()}
    by_path = {path: given[flat] for flat, path in paths.items()}
    for flat, path in paths.items():
        if by_path[path] is not given[flat]:
            raise ConfigError(f"Trainer(...) got two objects named {path}: give each function a different name")
    preset = preset_values(config.algorithm.algorithm, config.algorithm.loss)
    was_set = {flat for flat, key in all_keys().items() if key.name in config.named(key.section).model_fields_set}
    equal = {flat: config.value(flat) for flat in was_set - preset.keys()}  # also those that equal the default
    values: dict[str, Any] = config.changed_values | equal | paths
    if "reward" in paths:
        values["reward"] = [paths["reward"]]
    return Config(**values)


def path_of(instance: Any) -> str:
    """Return `module:name` of a function or a class; of a partial, that of its function; else that of its class."""
    instance = instance.func if isinstance(instance, partial) else instance
    named = instance if hasattr(instance, "__qualname__") else type(instance)
    return f"{named.__module__}:{named.__qualname__}"


def _with_rows(config: Config) -> Config:
    """Data from Python has no reasoning-gym task behind it, so neither its scorer nor its system prompt apply."""
    if config.data.prompt_data != DataConfig().prompt_data:
        raise ConfigError(
            f"--prompt-data {config.data.prompt_data} and Trainer(dataset=...) are both given: choose one"
        )
    return config.with_values(prompt_data=f"{FROM_PYTHON}dataset")


def _with_evaluation_rows(config: Config) -> Config:
    if config.data.eval_prompt_data:
        given = f"--eval-prompt-data {' '.join(config.data.eval_prompt_data)} and Trainer(eval_dataset=...)"
        raise ConfigError(f"{given} are both given: choose one")
    if not config.evaluates:
        raise ConfigError("Trainer(eval_dataset=...) has no effect: --eval-interval or --eval-size is 0")
    return config.with_values(eval_prompt_data=[f"{FROM_PYTHON}eval_dataset"])
