"""The command lines of `fsdptrain inspect` and `fsdptrain plan`: a model, and the machine that would train it."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdptrain.checkpoints import CONFIG_FILE
from fsdptrain.commands import is_run
from fsdptrain.config.flags import RECIPE, Option, Resolved, asks_for_help, resolve, take
from fsdptrain.errors import ConfigError

HF_CHECKPOINT = Option("--hf-checkpoint", str | None, "Hub id, or a folder: its config.json is enough.", None)
NUM_GPUS = Option("--num-gpus", int, "Processes over which the model is sharded. [GPUs]", 1)
JSON = Option("--json", bool, "Print JSON in place of tables.", False)
MACHINE = {
    "num_gpus": NUM_GPUS,
    "gpu_memory_gib": Option(
        "--gpu-memory-gib", float | None, "Memory of one GPU. Default: 80 is assumed. [GiB]", None
    ),
    "host_memory_gib": Option("--host-memory-gib", float | None, "Memory of one host of up to 8 GPUs. [GiB]", None),
}


def resolve_command(command: str, usage: str, argv: Sequence[str], options: Mapping[str, Option]) -> Resolved | None:
    """Resolve `fsdptrain COMMAND [RUN | MODEL] ...`, with `options` beside those of a run. None: it asks for help.

    Raises ConfigError for a machine with a value that is not a positive number.
    """
    if asks_for_help(argv):
        from fsdptrain.help_text import print_options

        print_options(f"fsdptrain {command} [RUN | MODEL]", usage, {"hf_checkpoint": HF_CHECKPOINT, **options})
        return None
    resolved = resolve(with_flag(argv), options)
    for key in MACHINE.keys() & options.keys():
        value = resolved.command_values[key]
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{MACHINE[key].flag} must be above 0 and finite, got {value}")
    if resolved.config.model.backend == "megatron":
        raise ConfigError(
            f"fsdptrain {command} supports --backend fsdp only: a run with --backend megatron checks its build"
        )
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return resolved


def with_flag(argv: Sequence[str]) -> list[str]:
    """Return `argv` with a flag for its first word, which may be a run or a model: its options, or --hf-checkpoint."""
    if not argv or argv[0].startswith("-"):
        return list(argv)
    run = Path(argv[0])
    flags = [RECIPE.flag, str(run / CONFIG_FILE)] if is_run(run) else [HF_CHECKPOINT.flag, argv[0]]
    return [*flags, *argv[1:]]


def without(argv: Sequence[str], options: Mapping[str, Option]) -> list[str]:
    """Return `argv`, which must be valid for `parse`, without `options` and their values."""
    by_flag = {option.flag: option for option in options.values()}
    others: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag, equals, _ = word.partition("=")
        option = by_flag.get(flag.replace("_", "-") if flag.startswith("--") else flag)
        if option is None:
            others.append(word)
        elif option.annotation is not bool and not equals:
            take(rest, many=option.many)
    return others
