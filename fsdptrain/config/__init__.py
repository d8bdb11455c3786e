"""Configuration of a run. Each option in `sections` is a flag, a recipe key and a Python keyword.

    Precedence: flag > recipe > preset of the algorithm > default.

A preset ranks just below the source that names its algorithm; see `precedence`.

In recipes and in Python, a key is given in its section or flat, as its flag name with underscores:

    Config(hf_checkpoint="Qwen/Qwen3-4B", fsdp_cpu_offload=True)
    Config(model={"hf_checkpoint": "Qwen/Qwen3-4B"}, fsdp={"cpu_offload": True})

`reward` and `algorithm` are both a section and a key in it: a mapping selects the section, any other value the key.
Nothing here imports torch, so `fsdptrain --help` starts fast.
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
