"""Data sources: reasoning-gym generators, JSONL and parquet files, `datasets` by name or folder, custom objects.

`--prompt-data` is a name with optional options after a `?`: `reasoning_gym:spell_backward?max_word_len=6`,
`openai/gsm8k?name=main&split=test`, `my/prompts.jsonl`. Rows are generated or read lazily.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml

from fsdptrain.config import DataConfig
from fsdptrain.data.images import as_pictures, content_of
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.registry import suggest
from fsdptrain.types import Message

GENERATOR = "reasoning_gym:"
FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class Row:
    """One example of a data set."""

    id: str  # unique within its data set and stable between runs
    prompt: str | list[Message]
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[Any, ...] = ()  # unopened images: see data/images.py


class Rows(Protocol):
    """Indexed rows, generated or read on demand. A list of rows qualifies."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


class Table(Protocol):
    """Input of `as_rows`: a `datasets.Dataset` or a list of mappings."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


def load_rows(data: DataConfig, *, seed: int, flag: str = "--prompt-data", image_key: str | None = None) -> Rows:
    """Load the rows of `data.prompt_data`. For evaluation data, pass a modified copy of `data` and the matching `flag`.

    Raises ConfigError for an unknown task, parameter or option, and DataError for unreadable data.
    """
    name, _, query = data.prompt_data.partition("?")
    options = _parse_options(query, flag=flag)
    if name.startswith(GENERATOR):
        return _generate(name.removeprefix(GENERATOR), {"seed": seed, "size": data.data_size, **options}, flag=flag)
    table = _load_table(name, {"split": data.prompt_split, **options}, flag=flag)
    path = Path(name)
    name = path.name if path.exists() else name
    return as_rows(table, data, name=name, flag=flag, folder=_folder_of(path), image_key=image_key)


def as_rows(
    dataset: Rows | Table,
    data: DataConfig,
    *,
    name: str = "dataset",
    flag: str = "--prompt-data",
    folder: Path = Path(),
    image_key: str | None = None,
) -> Rows:
    """Return rows of a list of `Row`, or of mappings with the columns in `data` (`label_key` "": no labels).

    `folder` is the base directory of image files, `image_key` the column of images.
    """
    if len(dataset) == 0:
        raise DataError(f"{flag} {name} has no rows; check the file and --prompt-split {data.prompt_split}")
    first = dataset[0]
    if isinstance(first, Row):
        return dataset  # type: ignore[return-value]  # a sequence of Row by its first element
    for option, column in (("--input-key", data.input_key), ("--label-key", data.label_key)):
        _check_column(option, column, first, where=f"{flag} {name}")
    if data.metadata_key is not None:
        _check_column("--metadata-key", data.metadata_key, first, where=f"{flag} {name}")
    if image_key is not None:
        _check_column("--image-key", image_key, first, where=f"{flag} {name}")
    keys = (data.input_key, data.label_key, data.metadata_key, image_key)
    return _TableRows(dataset, name, *keys, folder)  # type: ignore[arg-type]


def environment_rows(dataset: Sequence[Mapping[str, Any]]) -> Rows:
    """Return the rows of an environment: mappings with prompt, optional label and optional metadata."""
    if len(dataset) == 0:
        raise DataError("--prompt-data environment has no rows: the environment's dataset() is empty")
    table = _TableRows(dataset, "environment", "prompt", "label", "metadata")
    _check_column("dataset()", "prompt", dataset[0], where="--prompt-data environment")
    return table


def split_rows(rows: Rows, eval_size: int, seed: int) -> tuple[Rows, list[Row]]:
    """Split into training rows and up to `eval_size` distinct held-out rows, drawn by `seed`.

    Generators may repeat a question at other indices. Pass `content_hash` of the held-out rows to PromptStream, which
    skips duplicates of them. Raises DataError if no training rows are left.
    """
    held_out: dict[str, Row] = {}
    taken: set[int] = set()
    for index in torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()[: 4 * eval_size]:
        if len(held_out) == eval_size:
            break
        row = rows[index]
        held_out.setdefault(content_hash(row), row)
        taken.add(index)
    if len(taken) == len(rows):
        raise DataError(
            f"--eval-size {eval_size} leaves nothing to train on, the data has {len(rows)} rows; "
            "lower it, or name other data by --eval-prompt-data"
        )
    return _Subset(rows, [index for index in range(len(rows)) if index not in taken]), list(held_out.values())


def content_hash(row: Row) -> str:
    """Hash the prompt and images of a row, ignoring id, label and form (a string equals one user message)."""
    messages = as_messages(row.prompt)
    content = [[m["role"], m["content"].strip() if isinstance(m["content"], str) else m["content"]] for m in messages]
    content += [content_of(picture) for picture in row.images]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def as_messages(prompt: str | Sequence[Message]) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


class _GeneratedRows:
    """Lazily generated rows of a reasoning-gym task. The metadata holds what the task's scorer needs."""

    def __init__(self, task: str, dataset: Any) -> None:
        self.task = task
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)  # a generator would continue forever
        entry = self.dataset[index]
        metadata = {"task": self.task, "entry": entry}
        return Row(f"{self.task}:{index}", entry["question"], label=entry["answer"], metadata=metadata)


@dataclass(frozen=True)
class _TableRows:
    """Rows of a table by column names. An empty `label_key` or a `metadata_key` of None means no such column."""

    table: Table
    name: str
    input_key: str
    label_key: str
    metadata_key: str | None
    image_key: str | None = None
    folder: Path = Path()

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Row:
        values, row_id = self.table[index], f"{self.name}:{index}"
        return Row(
            id=row_id,
            prompt=_checked_prompt(values.get(self.input_key), row_id, self.input_key),
            label=values.get(self.label_key) if self.label_key else None,
            metadata=(values.get(self.metadata_key) or {}) if self.metadata_key else {},
            images=as_pictures(values.get(self.image_key), self.folder) if self.image_key else (),
        )


def _folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent if path.is_file() else Path()


@dataclass(frozen=True)
class _Subset:
    """Subset of rows, in the order of `indices`."""

    rows: Rows
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Row:
        return self.rows[self.indices[index]]


def _checked_prompt(prompt: Any, row_id: str, column: str) -> str | list[Message]:
    if isinstance(prompt, str):
        return prompt
    is_chat = isinstance(prompt, list) and prompt and all(isinstance(m, Mapping) for m in prompt)
    if not is_chat or not all(m.get("role") is not None and m.get("content") is not None for m in prompt):
        raise DataError(
            f"--input-key {column}: row {row_id} holds {str(prompt)[:80]!r}; "
            "a prompt is a text or a list of messages with role and content"
        )
    return prompt


def _check_column(option: str, column: str, row: Mapping[str, Any], *, where: str) -> None:
    if column not in row and not (option == "--label-key" and column == ""):
        none = ', or --label-key "" if there are no labels' if option == "--label-key" else ""
        raise DataError(
            f"{option} {column!r} is not a column of {where}{suggest(column, row)}; "
            f"set it to one of {', '.join(row)}{none}"
        )


def _generate(task: str, options: dict[str, Any], *, flag: str) -> Rows:
    import reasoning_gym  # lazy: takes 0.7 s
    from reasoning_gym.factory import DATASETS

    where = f"{flag} {GENERATOR}{task}"
    if task not in DATASETS:
        raise ConfigError(f"{where}: reasoning_gym has no task {task!r}{suggest(task, DATASETS)}")
    known = [parameter.name for parameter in dataclasses.fields(DATASETS[task][1])]
    for name in options:
        if name not in known:
            raise ConfigError(f"{where}: no parameter {name!r}{suggest(name, known)}; it takes {', '.join(known)}")
    try:
        dataset = reasoning_gym.create_dataset(task, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"{where} does not take {options}: {_first_line(error)}") from error
    return _GeneratedRows(task, dataset)


def _load_table(name: str, options: dict[str, Any], *, flag: str) -> Table:
    import datasets  # lazy: takes 1 s
    from datasets.exceptions import DatasetsError

    path = Path(name)
    is_file = path.suffix in FILE_FORMATS
    if is_file and not path.is_file():
        raise DataError(f"{flag} {name}: there is no such file")
    for option in options:
        if option not in ("name", "split", "revision", "data_dir"):
            raise ConfigError(f"{flag} {name}: no option {option!r}; it takes name, split, revision, data_dir")
    try:
        if is_file:
            if path.stat().st_size == 0:
                raise DataError(f"{flag} {name} has no rows: the file is empty")
            datasets.disable_progress_bars()  # reading a local file is fast
            return datasets.load_dataset(FILE_FORMATS[path.suffix], data_files=name, split="train")
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return _load_saved(path, options["split"])
        return datasets.load_dataset(name, **options)
    except (OSError, ValueError, KeyError, RuntimeError, DatasetsError) as error:
        cause = error.__cause__ or error
        raise DataError(f"{flag} {name} cannot be read: {_first_line(cause)}") from error


def _load_saved(path: Path, split: str) -> Table:
    """Load a directory of `save_to_disk`: one data set, or one per split."""
    import datasets

    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.Dataset):
        return saved
    if split not in saved:
        raise DataError(f"--prompt-split {split} is not in {path}; it has {', '.join(map(str, saved))}")
    return saved[split]


def _parse_options(query: str, *, flag: str) -> dict[str, Any]:
    """Parse `a=1&b=[x,y]`, with YAML values."""
    options: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        name, equals, text = part.partition("=")
        if not equals:
            raise ConfigError(f"{flag}: {part!r} behind the ? is not of the form name=value")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{flag}: {name}={text} is not a YAML value: {_first_line(error)}") from error
        is_exponent = isinstance(value, str) and re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", value)
        options[name] = float(value) if is_exponent else value  # PyYAML parses 1e-3, without a dot, as a string
    return options


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
