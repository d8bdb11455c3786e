"""Evaluation sets: the data of --eval-prompt-data by name, each with settings from --eval-set-options."""

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fsdptrain.config.keys import all_keys, build_sections
from fsdptrain.config.rules import NoEffectError, Problem
from fsdptrain.errors import ConfigError
from fsdptrain.registry import suggest

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

UNNAMED = "heldout"  # data without a name, and rows held out from --prompt-data
SETTINGS = {  # setting of a set -> the option that it replaces
    "reward": "reward", "samples": "n_samples_per_eval_prompt", "temperature": "eval_temperature",
    "greedy": "eval_greedy", "max_response_len": "rollout_max_response_len", "size": "eval_size",
    "input_key": "input_key", "label_key": "label_key",
}  # fmt: skip
_OF_ROWS = ("size", "input_key", "label_key")
_SET = re.compile(r"(?:([^=?:/.~][^=?:]*)=)?(.*)", re.DOTALL)  # NAME=DATA, or DATA


def parse_sets(texts: list[str]) -> list[tuple[str, str]]:
    """Return name and data of each value of --eval-prompt-data."""
    return [(name or UNNAMED, data) for [(name, data), *_] in map(_SET.findall, texts)]


def eval_sets(config: "Config") -> dict[str, "Config"]:
    """Return the configuration of each evaluation set by name: the run's, with the settings of the set.

    Its --prompt-data are those of the set. Its section `reward` is another object only if the set has rewards.
    """
    named = {name: {"prompt_data": data} for name, data in parse_sets(config.data.eval_prompt_data)}
    sets: dict[str, dict[str, Any]] = {**named} or {UNNAMED: {}}
    for name, setting, value in settings_of(config.data.eval_set_options):
        own = {"reward_key": None} if setting == "reward" else {}  # its rewards score all its rows
        sets[name] |= {SETTINGS[setting]: _value(setting, value), **own}
    return {name: config.with_values(**values) for name, values in sets.items()}


def problems(config: "Config") -> Iterator[Problem]:
    """Yield one line for each problem of --eval-prompt-data and --eval-set-options."""
    flag, texts = "--eval-prompt-data", config.data.eval_prompt_data
    sets = parse_sets(texts)
    names = [*(name for name, _ in sets), *(f"{name}_greedy" for name, _ in sets)]
    for text, (name, data) in zip(texts, sets, strict=True):
        if len(texts) > 1 and (data == text or names.count(name) > 1):  # the greedy samples of NAME are NAME_greedy
            yield f"{flag} {text}: with multiple sets, each needs a different name, NAME=DATA"
        if not re.fullmatch(r"[\w.-]+", name, re.ASCII) or data in ("", "None"):
            form = "NAME=DATA with a name of letters, digits, _ - and ."
            yield f"{flag} {text}: a set is {form}; write a path that holds = as ./{text}, unset it by no value"
        if data == "environment":
            yield f"{flag} {text}: remove it, prompts are held out from --prompt-data environment"
    for key in ("eval_metric", "stop_when"):
        found = re.match(r"eval/(.*)/", config.value(key) or "")
        if names and found and found[1] not in names:
            yield f"{all_keys()[key].shown(config)}: the evaluation sets are {', '.join(dict(sets))}"
    yield from _problems_of_settings(config, dict(sets), names)


def _problems_of_settings(config: "Config", sets: Mapping[str, str], names: list[str]) -> Iterator[Problem]:
    settings = list(settings_of(config.data.eval_set_options))
    for name, setting, value in settings:
        where, data = f"--eval-set-options {name}.{setting}", sets.get(name)
        if data is None:
            line = f"{where} has no effect: it is SET.SETTING=VALUE, SET one of {', '.join(sets)}"
            keeps = any(other in names for other, *_ in settings)  # a flag takes the effect of all, or of none
            yield line if keeps else NoEffectError(line, "eval_set_options")
        elif not config.generates and setting not in _OF_ROWS:
            yield NoEffectError(f"{where} has no effect with --algorithm sft: remove it", "eval_set_options")
        elif setting in _OF_ROWS[1:] and data.startswith("reasoning_gym:"):
            yield NoEffectError(f"{where} has no effect: {data} has no columns, remove it", "eval_set_options")
        if setting not in SETTINGS:
            yield f"{where}: a set has {', '.join(SETTINGS)}{suggest(setting, SETTINGS)}"
        try:
            _value(setting, value)
        except ConfigError as error:
            yield f"{where}: {error}"


def settings_of(options: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield set, setting and value of `set.setting: value`, and of `set: {setting: value}`."""
    for path, value in options.items():
        for setting, each in value.items() if isinstance(value, Mapping) else [("", value)]:
            name, _, last = f"{path}.{setting}".rstrip(".").rpartition(".")
            yield name, last, each


def _value(setting: str, value: Any) -> Any:
    """Return a setting as its option has it. Raises ConfigError if the option does not take the value."""
    if setting == "temperature" and value == 0 and not isinstance(value, bool):
        return 0.0  # greedy decoding
    key = all_keys()[SETTINGS[setting]]
    return getattr(build_sections({key.flat: value})[key.section], key.name)
