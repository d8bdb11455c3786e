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
    check_reward(config.reward, prompt_data=config.data.prompt_data, has_environment=config.environment.has_episodes)
    for name, flag in data_names(config):
        if not name.startswith(GENERATOR):
            from fsdptrain.launch.data_files import check_data

            check_data(config, name, flag)


def check_model_name(name: str, flag: str) -> None:
    """Raise CheckpointError if `name` is the path of a folder that does not exist, and not a name on the Hub."""
    first, *others = name.split("/")
    is_path = first in ("", ".", "..", "~") or len(others) != 1 or not others[0] or Path(first).is_dir()
    if not Path(name).is_dir() and (is_path if others else not name):
        raise CheckpointError(f"{flag} {name}: there is no such local folder, and a name on the Hub is owner/model")


def data_names(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the names of the data, with their flags."""
    if config.data.prompt_data != "environment":
        yield config.data.prompt_data, "--prompt-data"
    if config.evaluates and config.data.eval_prompt_data is not None:
        yield config.data.eval_prompt_data, "--eval-prompt-data"


def check_output_dir(config: Config) -> None:
    """Raise ConfigError if --output-dir cannot be created or written."""
    folder = Path(config.run.output_dir)
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"--output-dir {folder} cannot be written: {existing} is a file; choose another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--output-dir {folder} cannot be written: {existing} is read-only; choose another")
