"""Check the inputs of a run before torch is imported: reward, files of data and their columns, output folder.

The run makes the same checks, by the same functions, once more when it reads the inputs. What they cannot decide
without slow imports or the network is left to the run.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptrain.config.keys import all_keys
from fsdptrain.config.rules import Column
from fsdptrain.config.sft import sft_options
from fsdptrain.data.sources import GENERATOR
from fsdptrain.errors import ConfigError
from fsdptrain.rewards.build import check_reward

if TYPE_CHECKING:
    from fsdptrain.config import Config

_READ = 10 << 20  # bytes of a file: `datasets` takes the columns of its first 10 MiB too


def check_inputs(config: Config) -> None:
    """Raise the ConfigError or DataError that the run would raise after its imports."""
    check_output_dir(config)
    check_reward(config.reward, prompt_data=config.data.prompt_data, has_environment=config.environment.has_episodes)
    for name, flag in data_names(config):
        check_data(config, name, flag)


def data_names(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the names of the data, with their flags."""
    if config.data.prompt_data != "environment":
        yield config.data.prompt_data, "--prompt-data"
    if config.evaluates and config.data.eval_prompt_data is not None:
        yield config.data.eval_prompt_data, "--eval-prompt-data"


def check_data(config: Config, name: str, flag: str) -> None:
    """Check that a file exists and has the columns. Does not check folders and data sets of the hub."""
    name = name.partition("?")[0]
    if name.startswith(GENERATOR):
        return
    from fsdptrain.data.tables import folder_of, is_data_file, row_reader

    if not is_data_file(name, flag):
        return
    path = Path(name)
    if first := _first_row(path):
        images, sft = image_key(config), sft_options(config)
        row_reader(first, config.data, where=f"{flag} {path.name}", folder=folder_of(path), image_key=images, sft=sft)


def check_output_dir(config: Config) -> None:
    """Raise ConfigError if --output-dir cannot be created or written."""
    folder = Path(config.run.output_dir)
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"--output-dir {folder} cannot be written: {existing} is a file; choose another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--output-dir {folder} cannot be written: {existing} is read-only; choose another")


def image_key(config: Config) -> str | None:
    """Return the column of images: the option of a feature that names a column."""
    keys = (key for key in all_keys().values() if key.marks(Column) and key.section != config.data.NAME)
    return next((found for key in keys if (found := key.value(config)) is not None), None)


def _first_row(path: Path) -> Mapping[str, Any] | None:
    """Return a row with the columns of a file, the first one where it is read. None: not readable here."""
    try:
        if path.suffix == ".csv":
            with path.open(newline="", encoding="utf-8-sig") as file:
                return dict.fromkeys(next(csv.reader(file), []), "")
        if path.suffix in (".jsonl", ".json"):
            return _first_json(path)
    except (OSError, ValueError, csv.Error, RecursionError):  # the run reports it in the words of `datasets`
        return None
    return None


def _first_json(path: Path) -> Mapping[str, Any] | None:
    with path.open("rb") as file:
        lines = file.readlines(_READ)
    rows = [json.loads(line) for line in lines if line.strip()]
    if not rows or not all(isinstance(row, dict) for row in rows):
        return None
    return {**{name: None for row in rows for name in row}, **rows[0]}
