"""Configuration of a run. Each field of a `Section` is a flag, a recipe key and a Python keyword.

    Precedence: flag > recipe > preset of the algorithm > default.

A preset ranks just below the source that names its algorithm; see `recipe`.

In recipes and in Python, a key is given in its section or flat, as its flag name with underscores:

    Config(hf_checkpoint="Qwen/Qwen3-4B", fsdp_cpu_offload=True)
    Config(model={"hf_checkpoint": "Qwen/Qwen3-4B"}, fsdp={"cpu_offload": True})

Some names, such as `reward` and `algorithm`, are both a section and a key in it: a mapping selects the section, any
other value the key. Optional folders and plug-ins add sections: see `keys.all_sections`.

Nothing here imports torch, so `fsdptrain --help` starts fast.
"""

from fsdptrain.config.algorithm import AlgorithmConfig
from fsdptrain.config.checks import check_processes, check_world_size
from fsdptrain.config.data import DataConfig, EnvironmentConfig, RewardConfig
from fsdptrain.config.flags import resolve
from fsdptrain.config.model import FsdpConfig, OptimConfig
from fsdptrain.config.rollout import RolloutConfig
from fsdptrain.config.root import Config
from fsdptrain.config.run import LogConfig
from fsdptrain.config.section import Section
from fsdptrain.config.written import to_yaml

__all__ = [
    "AlgorithmConfig",
    "Config",
    "DataConfig",
    "EnvironmentConfig",
    "FsdpConfig",
    "LogConfig",
    "OptimConfig",
    "RewardConfig",
    "RolloutConfig",
    "Section",
    "check_processes",
    "check_world_size",
    "resolve",
    "to_yaml",
]
