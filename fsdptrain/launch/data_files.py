"""Check the files of --prompt-data before torch is imported."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptrain.config.data import sft_options
from fsdptrain.config.keys import all_keys
from fsdptrain.config.rules import COLUMN
from fsdptrain.data.tables import JsonRows, csv_columns, folder_of, is_data_file, row_reader
from fsdptrain.errors import DataError

if TYPE_CHECKING:
    from fsdptrain.config import Config

_READ = 10 << 20  # bytes of a file: enough to see its columns


def check_data(config: Config, flag: str) -> None:
    """Check that a file of --prompt-data exists and has the columns. Checks no folders and data sets of the hub."""
    name = config.data.prompt_data.partition("?")[0]
    if not is_data_file(name, flag):
        return
    path = Path(name)
    if first := _first_row(path):
        images, sft = image_key(config), sft_options(config)
        row_reader(first, config.data, where=f"{flag} {path.name}", folder=folder_of(path), image_key=images, sft=sft)


def _first_row(path: Path) -> Mapping[str, Any] | None:
    """Return a row with the columns of a file, the first one where it is read. None: not readable here."""
    try:
        if path.suffix == ".csv":
            return dict.fromkeys(csv_columns(path), "")
        if path.suffix in (".jsonl", ".json"):
            with path.open("rb") as file:
                return JsonRows(file.readlines(_READ), path, "")[0]
    except (OSError, ValueError, IndexError, csv.Error, DataError):  # the run says what is wrong
        return None
    return None


def image_key(config: Config) -> str | None:
    """Return the column of images: the option of a feature that names a column."""
    keys = (key for key in all_keys().values() if COLUMN in key.field.metadata and key.section != config.data.NAME)
    return next((column for key in keys if (column := key.value(config)) is not None), None)
