"""Location of an option: section, name, flat name and flag."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from fsdptrain.config import sections
from fsdptrain.config.algorithm import AlgorithmConfig, SelectionConfig, ShapingConfig
from fsdptrain.config.former_flags import FORMER_FLAGS
from fsdptrain.config.megatron import MegatronConfig
from fsdptrain.config.section import Section
from fsdptrain.config.sync import SyncConfig
from fsdptrain.errors import ConfigError
from fsdptrain.registry import suggest

SECTIONS: dict[str, type[Section]] = {
    "model": sections.ModelConfig,
    "lora": sections.LoraConfig,
    "data": sections.DataConfig,
    "reward": sections.RewardConfig,
    "environment": sections.EnvironmentConfig,
    "algorithm": AlgorithmConfig,
    "shaping": ShapingConfig,
    "selection": SelectionConfig,
    "optim": sections.OptimConfig,
    "batch": sections.BatchConfig,
    "fsdp": sections.FsdpConfig,
    "parallel": sections.ParallelConfig,
    "megatron": MegatronConfig,
    "rollout": sections.RolloutConfig,
    "sync": SyncConfig,
    "ref": sections.RefConfig,
    "router": sections.RouterConfig,
    "run": sections.RunConfig,
    "log": sections.LogConfig,
    "launch": sections.LaunchConfig,
}


@dataclass(frozen=True)
class Key:
    """Option of the configuration."""

    section: str
    name: str  # within its section
    field: FieldInfo

    @property
    def flat(self) -> str:
        return f"{self.section}_{self.name}" if self.section in sections.PREFIXED else self.name

    @property
    def default(self) -> Any:
        return self.field.get_default(call_default_factory=True)

    def value(self, config: Section) -> Any:
        """Return its value in a `Config`."""
        return getattr(getattr(config, self.section), self.name)

    @property
    def flag(self) -> str:
        return "--" + self.flat.replace("_", "-")


@cache
def all_keys() -> Mapping[str, Key]:
    """Return all options by flat name, in declaration order."""
    keys = [Key(section, name, f) for section, cls in SECTIONS.items() for name, f in cls.model_fields.items()]
    return {key.flat: key for key in keys}


def flag_of(section: str, name: str) -> str:
    return Key(section, name, SECTIONS[section].model_fields[name]).flag


def group_by_section(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Convert mixed sections and flat keys to section -> name -> value.

    Raises ConfigError for unknown or repeated keys.
    """
    grouped: dict[str, dict[str, Any]] = {}
    for section, name, value in _pairs(values):
        fields = grouped.setdefault(section, {})
        if name in fields:
            raise ConfigError(f"{section}.{name} is given twice, in its section and flat: give it once")
        fields[name] = value
    return grouped


def _pairs(values: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    keys = all_keys()
    for key, value in values.items():
        is_section = key in SECTIONS and (isinstance(value, Mapping | Section) or key not in keys)
        if is_section:
            yield from ((key, name, v) for name, v in _fields_of(key, value).items())
        elif key in keys:
            yield keys[key].section, keys[key].name, value
        else:
            raise ConfigError(f"unknown key {str(key)!r}{advice(str(key), [*keys, *SECTIONS])}")


def _fields_of(section: str, value: Any) -> dict[str, Any]:
    if isinstance(value, SECTIONS[section]):
        return {name: v for name, v in value if name in value.model_fields_set}
    if value is None:
        return {}  # empty `model:` in YAML
    if not isinstance(value, Mapping):
        raise ConfigError(f"{section!r} is a section, it takes a mapping such as {_example(section)}, got {value!r}")
    known = list(SECTIONS[section].model_fields)
    for name in value:
        if name not in known:
            raise ConfigError(f"unknown key {str(name)!r} in section {section!r}{advice(str(name), known)}")
    return dict(value)


def _example(section: str) -> str:
    name, field = next(iter(SECTIONS[section].model_fields.items()))
    return f"{{{name}: {field.default!r}}}"


# Flags of TRL and transformers -> equivalent flags here.
NAMES_ELSEWHERE = {
    "--learning-rate": "--lr",
    "--model": "--hf-checkpoint",
    "--model-name-or-path": "--hf-checkpoint",
    "--dataset": "--prompt-data",
    "--dataset-name": "--prompt-data",
    "--num-generations": "--n-samples-per-prompt",
    "--max-completion-length": "--rollout-max-response-len",
    "--max-prompt-length": "--rollout-max-prompt-len",
    "--max-steps": "--num-rollout",
    "--beta": "--kl-loss-coef",
    "--temperature": "--rollout-temperature",
    "--save-steps": "--save-interval",
    "--eval-steps": "--eval-interval",
    "--report-to": "--log-to",
}


# Flags of torchrun -> advice.
_TORCHRUN = (
    ": torchrun starts several machines: torchrun --nnodes N --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "
    "HOST:29500 -m fsdptrain ..."
)
_INTERFACES = ": set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in the environment"
TORCHRUN_FLAGS = {
    "--nnodes": _TORCHRUN,
    "--node-rank": _TORCHRUN,
    "--rdzv-backend": _TORCHRUN,
    "--rdzv-endpoint": _TORCHRUN,
    "--rdzv-id": _TORCHRUN,
    "--master-addr": _TORCHRUN,
    "--master-port": _TORCHRUN,
    "--node-timeout": _TORCHRUN,
    "--network-interface": _INTERFACES,
}


def advice(name: str, known: list[str]) -> str:
    """Return advice for an unknown `name`: an equivalent of slime, torchrun or another trainer, or the nearest name."""
    flag = "--" + name.lstrip("-").replace("_", "-")
    if flag in TORCHRUN_FLAGS:
        return TORCHRUN_FLAGS[flag]
    if former := FORMER_FLAGS.get(flag):
        return f": {former.advice}"
    return f": it is {NAMES_ELSEWHERE[flag]} here" if flag in NAMES_ELSEWHERE else suggest(name, known)
