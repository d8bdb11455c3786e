"""Options of `fsdptrain inspect` and `fsdptrain plan`: a model, and the machine that would train it."""

import json
import math
import os
import sys
from collections.abc import Mapping

from fsdptrain.config.flags import Option
from fsdptrain.errors import ConfigError

HF_CHECKPOINT = Option("--hf-checkpoint", str | None, "Hub id, or a folder: its config.json is enough.", None)
NUM_GPUS = Option("--num-gpus", int, "Processes over which the model is sharded. [GPUs]", 1)
JSON = Option("--json", bool, "Print JSON in place of tables.", False)
MACHINE = {
    "num_gpus": NUM_GPUS,
    "gpu_memory_gib": Option("--gpu-memory-gib", float, "Memory of one GPU. [GiB]", 80.0),
    "host_memory_gib": Option("--host-memory-gib", float | None, "Memory of one host of up to 8 GPUs. [GiB]", None),
}


def check_machine(machine: Mapping[str, float | None]) -> None:
    """Raise ConfigError for a value that is not a positive number."""
    for key, value in machine.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{MACHINE[key].flag} must be above 0 and finite, got {value}")


def print_json(values: object) -> None:
    sys.stdout.write(json.dumps(values, indent=2) + "\n")


def quiet_transformers() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
