"""`--dry-run`: check the inputs and the sizes, and print each value with its source, without training."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from fsdptrain.config import Config, DataConfig
from fsdptrain.config.checks import check_world_size
from fsdptrain.config.flags import Resolved
from fsdptrain.config.grid import draw_grid
from fsdptrain.config.sft import sft_options
from fsdptrain.config.written import to_yaml
from fsdptrain.data.sources import GENERATOR, load_rows
from fsdptrain.launch.inputs import check_inputs, data_names, image_key
from fsdptrain.model.loading.formats import with_config
from fsdptrain.rank_variables import read_rank_variables

_READ_WHOLE = 64 << 20  # bytes of a file of data


def dry_run(resolved: Resolved) -> None:
    """Print the configuration as a recipe, the rank groups, and what was not checked.

    Raises ConfigError, DataError or CheckpointError for what would end the run at its start: an option, a file, a
    column, a reward, or a size that the model does not allow. Does not count devices and does not use the network.
    """
    config = resolved.config
    ranks = read_rank_variables()
    check_inputs(config)
    for name, flag in data_names(config):
        _check_data(config, name, flag)
    if config.environment.environment is not None:
        from fsdptrain.trainer.samples.environment import find_environment

        find_environment(config.environment.environment)
    is_local = _check_model_folder(config)
    local = ranks.local_world_size if ranks else config.launch.nproc_per_node
    world_size = ranks.world_size if ranks else local
    if world_size is not None:
        check_world_size(config, world_size)
    if is_local:
        _check_sizes(config)
    sys.stdout.write(to_yaml(config, resolved.sources))
    notes = [] if world_size is None else draw_grid(config, world_size)
    notes += [f"not checked: {line}" for line in _unchecked(config, is_local)]
    sys.stdout.writelines(f"# {note}\n" for note in notes)


def _check_data(config: Config, name: str, flag: str) -> None:
    """Check what `check_inputs` cannot without `datasets` or reasoning_gym, which take 1 s to import."""
    is_generated = name.startswith(GENERATOR) and name != DataConfig().prompt_data  # the default needs no check
    if is_generated or _is_small_file(name):
        data = config.data.source(name)
        load_rows(data, seed=config.run.seed, flag=flag, image_key=image_key(config), sft=sft_options(config))


def _is_small_file(name: str) -> bool:
    path = Path(name.partition("?")[0])
    return path.is_file() and path.stat().st_size <= _READ_WHOLE


def _check_model_folder(config: Config) -> bool:
    """Return whether --hf-checkpoint is a local folder. Raises CheckpointError if it holds no model."""
    path = Path(config.model.hf_checkpoint)
    if path.is_dir():
        with_config(path)
    return path.is_dir()


def _check_sizes(config: Config) -> None:
    """Raise ConfigError if the backend cannot build the model in the parallel sizes. Imports torch if it must."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if config.model.backend == "fsdp" and any(group.size > 1 for group in config.rank_groups):
        from fsdptrain.tools.inspect.inspection import check_sizes

        check_sizes(config)
    elif config.model.backend == "megatron" and _has_megatron():
        from fsdptrain.megatron.model import check_sizes as check_megatron_sizes

        check_megatron_sizes(config)


def _has_megatron() -> bool:
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


def _unchecked(config: Config, is_local: bool) -> Iterator[str]:
    """Yield what only the run checks."""
    if not is_local:
        yield f"--hf-checkpoint {config.model.hf_checkpoint}, which is no local folder: on the Hub?"
    elif config.model.backend != "fsdp" and not _has_megatron():
        yield f"whether the model allows the sizes of --backend {config.model.backend}, which is not installed here"
    for name, flag in data_names(config):
        if not name.startswith(GENERATOR) and not _is_small_file(name):
            yield f"{flag} {name}, which is no small local file: " + (
                "its columns" if Path(name).exists() else "on the Hub?"
            )
    folder = Path(config.model.hf_checkpoint)
    if is_local and folder.is_dir() and not any(folder.glob("*.safetensors")):
        yield f"the weights of --hf-checkpoint {folder}: there are none"
