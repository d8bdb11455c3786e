"""The configuration of a run: one declaration (`sections`), three faces (flag, recipe key, Python keyword).

    default < preset of the algorithm < recipe < flag

A preset stands just below whoever names its algorithm: see precedence.

In a recipe and in Python a key may stand in its section or flat, by its flag's name with underscores:

    Config(hf_checkpoint="Qwen/Qwen3-4B", fsdp_cpu_offload=True)
    Config(model={"hf_checkpoint": "Qwen/Qwen3-4B"}, fsdp={"cpu_offload": True})

`reward` and `algorithm` are both a section and a key in it: a mapping means the section, anything else the key.
Nothing here imports torch, so that `fsdptrain --help` is instant.
"""

from fsdptrain.config.algorithm import AlgorithmConfig, SelectionConfig, ShapingConfig
from fsdptrain.config.checks import check_own_launch, check_processes, check_world_size
from fsdptrain.config.flags import Resolved, resolve
from fsdptrain.config.recipe import load_recipe, read_recipe, to_yaml
from fsdptrain.config.root import Config
from fsdptrain.config.section import Section
from fsdptrain.config.sections import (
    PREFIXED,
    BatchConfig,
    DataConfig,
    EnvironmentConfig,
    FsdpConfig,
    LaunchConfig,
    LogConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RefConfig,
    RewardConfig,
    RolloutConfig,
    RouterConfig,
    RunConfig,
)

__all__ = [
    "PREFIXED",
    "AlgorithmConfig",
    "BatchConfig",
    "Config",
    "DataConfig",
    "EnvironmentConfig",
    "FsdpConfig",
    "LaunchConfig",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "RefConfig",
    "Resolved",
    "RewardConfig",
    "RolloutConfig",
    "RouterConfig",
    "RunConfig",
    "Section",
    "SelectionConfig",
    "ShapingConfig",
    "check_own_launch",
    "check_processes",
    "check_world_size",
    "load_recipe",
    "read_recipe",
    "resolve",
    "to_yaml",
]
