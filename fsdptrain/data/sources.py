"""Data sources by name: reasoning-gym generators, and tables (data/tables.py).

`--prompt-data` is a name with optional options after a `?`: `reasoning_gym:spell_backward?max_word_len=6`,
`openai/gsm8k?name=main&split=test`, `my/prompts.jsonl`. Rows are generated or read lazily.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fsdptrain.config import Config, DataConfig
from fsdptrain.config.data import SftConfig, sft_options
from fsdptrain.data.rows import Row, Rows
from fsdptrain.errors import ConfigError
from fsdptrain.registry import suggest

GENERATOR = "reasoning_gym:"
FROM_PYTHON = "python:"  # begins the name of rows that `Trainer` got as objects
NUM_GENERATED = 100_000  # rows, unless the data names a size: reasoning_gym:TASK?size=5000


def load_rows(
    data: DataConfig,
    *,
    seed: int,
    flag: str = "--prompt-data",
    image_key: str | None = None,
    sft: SftConfig | None = None,
) -> Rows:
    """Load the rows of `data.prompt_data`. For evaluation data, pass a modified copy of `data` and the matching `flag`.

    sft: options of supervised data; None for prompts.
    Raises ConfigError for an unknown task, parameter or option, and DataError for unreadable data.
    """
    name, _, query = data.prompt_data.partition("?")
    options = parse_options(query, flag=flag)
    if name.startswith(GENERATOR):
        return _generate(name.removeprefix(GENERATOR), {"seed": seed, "size": NUM_GENERATED, **options}, flag=flag)
    if name.startswith(FROM_PYTHON):
        raise ConfigError(f"{flag} {name}: the run got these rows as a Python object; name a file with them")
    from fsdptrain.data.tables import as_rows, folder_of, load_table

    table, path = load_table(name, options, flag=flag), Path(name)
    name = path.name if path.exists() else name
    return as_rows(table, data, name=name, flag=flag, folder=folder_of(path), image_key=image_key, sft=sft)


def open_rows(
    config: Config,
    data: DataConfig,
    dataset: Sequence[Mapping[str, Any]] | None = None,
    *,
    image_key: str | None,
    flag: str = "--prompt-data",
) -> Rows:
    """Open the rows of `data`, or of `dataset` in place of it, for a run."""
    options: dict[str, Any] = {"flag": flag, "image_key": image_key, "sft": sft_options(config)}
    if dataset is None:
        return load_rows(data, seed=config.run.seed, **options)
    from fsdptrain.data.tables import as_rows

    return as_rows(dataset, data, **options)


@dataclasses.dataclass(frozen=True)
class _GeneratedRows:
    """Lazily generated rows of a reasoning-gym task. The metadata holds what the task's scorer needs."""

    task: str
    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)  # a generator would continue forever
        entry = self.dataset[index]
        metadata = {"task": self.task, "entry": entry}
        return Row(f"{self.task}:{index}", entry["question"], label=entry["answer"], metadata=metadata)


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
        len(dataset)  # some tasks take a size of any type
    except (AssertionError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where} does not take {options}: {first_line(error)}") from error
    return _GeneratedRows(task, dataset)


def parse_options(query: str, *, flag: str) -> dict[str, Any]:
    """Parse `a=1&b=[x,y]`, with YAML values."""
    options: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        name, equals, text = part.partition("=")
        if not equals:
            raise ConfigError(f"{flag}: {part!r} after ? must be name=value")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # 5,000 digits, 1,000 nested lists
            raise ConfigError(f"{flag}: {name}={text} is not a YAML value: {first_line(error)}") from error
        is_exponent = isinstance(value, str) and re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", value)
        options[name] = float(value) if is_exponent else value  # PyYAML parses 1e-3, without a dot, as a string
    return options


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
