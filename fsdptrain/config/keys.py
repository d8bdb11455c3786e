"""The sections that are installed, and the location of each option: section, name, flat name and flag."""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from fsdptrain.config.algorithm import AlgorithmConfig, SelectionConfig, ShapingConfig
from fsdptrain.config.data import DataConfig, EnvironmentConfig, RewardConfig, SftConfig
from fsdptrain.config.model import FsdpConfig, ModelConfig, OptimConfig, RefConfig
from fsdptrain.config.rollout import BatchConfig, RolloutConfig, SyncConfig
from fsdptrain.config.rules import OnResume, Rule
from fsdptrain.config.run import LaunchConfig, LogConfig, RunConfig
from fsdptrain.config.section import Section
from fsdptrain.errors import OPTIONS, ConfigError
from fsdptrain.registry import load_plugins

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

M = TypeVar("M")

CORE_SECTIONS: tuple[type[Section], ...] = (
    ModelConfig, DataConfig, RewardConfig, EnvironmentConfig, AlgorithmConfig, ShapingConfig, SelectionConfig,
    SftConfig, OptimConfig, BatchConfig, FsdpConfig, RolloutConfig, SyncConfig, RefConfig, RunConfig, LogConfig,
    LaunchConfig,
)  # fmt: skip
_OPTIONAL = {  # folder, if installed -> module with a tuple SECTIONS
    "fsdptrain.features": "fsdptrain.features.sections",
    "fsdptrain.vllm": "fsdptrain.vllm.config",
    "fsdptrain.megatron": "fsdptrain.megatron.config",
}


@dataclass(frozen=True)
class Key:
    """Option of the configuration."""

    cls: type[Section]
    name: str  # within its section

    @property
    def section(self) -> str:
        return self.cls.NAME

    @property
    def field(self) -> FieldInfo:
        return self.cls.model_fields[self.name]

    @property
    def flat(self) -> str:
        return self.cls.PREFIX + self.name

    @property
    def flag(self) -> str:
        return "--" + self.flat.replace("_", "-")

    @property
    def default(self) -> Any:
        return self.field.get_default(call_default_factory=True)

    def value(self, config: "Config") -> Any:
        return getattr(config.named(self.section), self.name)

    @property
    def rules(self) -> list[Rule]:
        return [*self.marks(Rule), *self.cls.RULES]

    @property
    def on_resume(self) -> OnResume:
        return next(iter(self.marks(OnResume)), self.cls.ON_RESUME)

    def marks(self, kind: type[M]) -> list[M]:
        return [mark for mark in self.field.metadata if isinstance(mark, kind)]

    def shown(self, config: "Config") -> str:
        """Return the flag with its value, as on the command line."""
        value = self.value(config)
        if isinstance(value, bool):
            return self.flag if value else f"--no-{self.flag.removeprefix('--')}"
        return f"{self.flag} {' '.join(map(str, value)) if isinstance(value, list) else value}"


@cache
def all_sections() -> Mapping[str, type[Section]]:
    """Return the installed sections by name: of the core, of the optional folders, then of plug-ins.

    A plug-in is an entry point `sections.<name>` of the group `fsdptrain.plugins`: a subclass of `Section`. Raises
    ConfigError for two sections of one name.
    """
    classes = list(CORE_SECTIONS)
    for folder, module in _OPTIONAL.items():
        if importlib.util.find_spec(folder) is not None:
            classes += importlib.import_module(module).SECTIONS
    sections: dict[str, type[Section]] = {}
    for cls in [*classes, *load_plugins("sections")]:
        if not cls.NAME or cls.NAME in sections:
            raise ConfigError(f"section {cls.NAME!r} of {cls.__module__} needs a NAME that no other section has")
        sections[cls.NAME] = cls
    return sections


@cache
def all_keys() -> Mapping[str, Key]:
    """Return all options by flat name, in declaration order. Raises ConfigError for two options of one name."""
    keys: dict[str, Key] = {}
    for cls in all_sections().values():
        for key in (Key(cls, name) for name in cls.model_fields):
            if key.flat in keys:
                raise ConfigError(f"{cls.__module__}: {key.flag} is an option of section {keys[key.flat].section} too")
            keys[key.flat] = key
    OPTIONS.update(keys)
    return keys


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert mixed sections and flat keys to flat keys. Raises ConfigError for unknown or repeated keys."""
    keys, sections = all_keys(), all_sections()
    has_sections = any(key in sections and isinstance(value, Mapping | Section) for key, value in values.items())
    if not has_sections and values.keys() <= keys.keys():
        return dict(values)
    from fsdptrain.config.flatten import flatten_sections

    return flatten_sections(values)


def build_sections(values: Mapping[str, Any]) -> dict[str, Section]:
    """Build and validate the sections of `values` (flat). Raises ConfigError with all invalid fields."""
    grouped: dict[str, dict[str, Any]] = {}
    for flat, value in values.items():
        if isinstance(value, str) and "\0" in value:  # no file has such a name
            raise ConfigError(f"{all_keys()[flat].flag} holds a NUL character: {value!r:.80}")
        grouped.setdefault(all_keys()[flat].section, {})[all_keys()[flat].name] = value
    sections: dict[str, Section] = {}
    problems: list[str] = []
    for name, fields in grouped.items():
        try:
            sections[name] = all_sections()[name](**fields)
        except ValidationError as error:
            from fsdptrain.config.problems import field_problems

            problems += field_problems(error, section=name)
    if problems:
        raise ConfigError(*problems)
    return sections
