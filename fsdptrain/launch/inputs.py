"""Check the inputs of a run before torch is imported: reward, files of data and their columns, output folder.

The run makes the same checks, by the same functions, once more when it reads the inputs. What they cannot decide
without slow imports or the network is left to the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fsdptrain.checkpoints import check_resume
from fsdptrain.config.checks import check_packages
from fsdptrain.data.sources import GENERATOR
from fsdptrain.errors import CheckpointError, ConfigError
from fsdptrain.rewards.build import check_reward

if TYPE_CHECKING:
    from fsdptrain.config import Config


def check_inputs(config: Config) -> None:
    """Raise the ConfigError or DataError that the run would raise after its imports."""
    check_packages(config)
    check_output_dir(config)
    check_resume(config.run.resume)
    check_model_name(config.model.hf_checkpoint, "--hf-checkpoint")
    for one, flag in data_configs(config):
        if one is config or one.reward is not config.reward:
            check_reward(one.reward, prompt_data=one.data.prompt_data, has_environment=config.environment.has_episodes)
        if not one.data.prompt_data.startswith(GENERATOR):
            from fsdptrain.launch.data_files import check_data

            check_data(one, flag)


def check_model_name(name: str, flag: str) -> None:
    """Raise CheckpointError if `name` is the path of a folder that does not exist, and not a name on the Hub."""
    first, *others = name.split("/")
    is_path = first in ("", ".", "..", "~") or len(others) != 1 or not others[0] or Path(first).is_dir()
    if not Path(name).is_dir() and (is_path if others else not name):
        raise CheckpointError(f"{flag} {name}: there is no such local folder, and a name on the Hub is owner/model")


def data_configs(config: Config) -> Iterator[tuple[Config, str]]:
    """Yield the flags of the data, with configurations that have these as --prompt-data."""
    yield config, "--prompt-data"
    if config.evaluates and config.data.eval_prompt_data:
        from fsdptrain.config.eval_sets import eval_sets

        yield from ((one, "--eval-prompt-data") for one in eval_sets(config).values())


def check_output_dir(config: Config) -> None:
    """Raise ConfigError if --output-dir cannot be created or written."""
    folder = Path(config.run.output_dir)
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"--output-dir {folder} cannot be written: {existing} is a file; choose another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--output-dir {folder} cannot be written: {existing} is read-only; choose another")
