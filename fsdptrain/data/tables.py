"""Rows of tables: files, folders and hub data sets, read by `datasets`; lists of mappings, environments."""

import csv
import json
import logging
import re
import warnings
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fsdptrain.config import DataConfig
from fsdptrain.config.data import SftConfig
from fsdptrain.data.images import as_images
from fsdptrain.data.rows import Row, Rows
from fsdptrain.data.sources import first_line
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.registry import suggest
from fsdptrain.types import Message

if TYPE_CHECKING:
    import datasets

log = logging.getLogger(__name__)

ReadRow = Callable[[Mapping[str, Any], str], Row]  # (values by column, id of the row)
_EMPTY = ("", "None", "none", "null", "[]", "{}")  # also as JSON text
_UNREAD = {
    "tools": "which no prompt would show: write the tools into the system message, or remove or rename the column",
    "chat_template_kwargs": "which is not read: set --chat-template-kwargs for all rows, and remove the column",
}
_LIKE_CHAT = re.compile(r"\s*\[\s*\{.*[\"']role[\"']\s*:.*\}\s*\]\s*", re.DOTALL)
FILE_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}


class Table(Protocol):
    """Input of `tables.as_rows`: a `datasets.Dataset` or a list of mappings."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


def as_rows(
    dataset: Rows | Table,
    data: DataConfig,
    *,
    name: str = "dataset",
    flag: str = "--prompt-data",
    folder: Path = Path(),
    image_key: str | None = None,
    sft: SftConfig | None = None,
) -> Rows:
    """Return rows of a list of `Row`, or of mappings with the columns in `data` (`label_key` "": no labels).

    `folder` is the base directory of image files, `image_key` the column of images. sft: the rows are supervised data
    and may have any of its forms.
    """
    if not isinstance(dataset, Sized):
        raise DataError(f"{flag} {name} is a {type(dataset).__name__}, without a length: pass a Dataset or a list")
    if len(dataset) == 0:
        raise DataError(f"{flag} {name} has no rows: check the file, or the split after ?")
    first = _read(dataset, 0, name)
    if isinstance(first, Row):
        return dataset  # type: ignore[return-value]  # a sequence of Row by its first element
    if hidden := [column for column in ("functions", "documents") if column in first]:
        log.warning("%s %s: no prompt shows the column %s: write it into messages", flag, name, " or ".join(hidden))
    read = row_reader(first, data, where=f"{flag} {name}", folder=folder, image_key=image_key, sft=sft)
    return _TableRows(dataset, name, read)  # type: ignore[arg-type]


def row_reader(
    first: Mapping[str, Any],
    data: DataConfig,
    *,
    where: str,
    folder: Path = Path(),
    image_key: str | None = None,
    sft: SftConfig | None = None,
) -> ReadRow:
    """Return the function that converts the rows of a table, whose first row is `first`. Checks the columns."""
    if sft is not None and image_key is None:
        from fsdptrain.data.sft_forms import form_reader

        data, read = form_reader(first, data, sft, where=where)
        if read is not None:
            return read
    options = {"--input-key": data.input_key, "--label-key": data.label_key, "--reward-key": data.reward_key}
    for option, column in {**options, "--environment-key": data.environment_key, "--image-key": image_key}.items():
        if column is not None:
            _check_column(option, column, first, where=where)
    columns = partial(_read_columns, data=data, image_key=image_key, folder=folder)
    if sft is None or image_key is not None:
        return columns
    from fsdptrain.data.sft_forms import usable_or_marked

    return usable_or_marked(columns)


def environment_rows(dataset: Sequence[Mapping[str, Any]]) -> Rows:
    """Return the rows of an environment: mappings with prompt, other columns, and a label in any of them."""
    rows = as_rows(dataset, DataConfig(label_key=""), name="environment")
    read = partial(_read_columns, data=DataConfig(), image_key=None, folder=Path())
    return replace(rows, read=read) if isinstance(rows, _TableRows) else rows


@dataclass(frozen=True)
class _TableRows:
    """Rows of a table."""

    table: Table
    name: str
    read: ReadRow

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Row:
        return self.read(_read(self.table, index, self.name), f"{self.name}:{index}")


def _read_columns(
    values: Mapping[str, Any], row_id: str, *, data: DataConfig, image_key: str | None, folder: Path
) -> Row:
    """Convert a row by column names. Metadata are all columns but images."""
    image = values.get(image_key) if image_key else None
    values = plain({name: value for name, value in values.items() if name != image_key})
    refuse_columns(values, row_id, *_UNREAD)
    return Row(
        id=row_id,
        prompt=_checked_prompt(value_in(values, data.input_key), row_id, data.input_key, parts=image_key is not None),
        label=value_in(values, data.label_key) if data.label_key else None,
        metadata=values,
        images=as_images(image, folder) if image_key else (),
    )


def refuse_columns(values: Mapping[str, Any], row_id: str, *columns: str) -> None:
    """Raise DataError for columns with a value, of those that other trainers pass to the chat template."""
    for column in columns:
        if str(values.get(column)).strip() not in _EMPTY:
            raise DataError(f"row {row_id} has a column `{column}`, {_UNREAD[column]}")


def _read(table: Any, index: int, name: str) -> Any:
    try:
        return table[index]
    except UnicodeDecodeError as error:  # `datasets` decodes a row when it is read
        raise DataError(f"row {name}:{index}, counted from 0, is not text in UTF-8: {error}") from error


def folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent if path.is_file() else Path()


def _checked_prompt(cell: Any, row_id: str, column: str, *, parts: bool) -> str | list[Message]:
    """Return a prompt as a text or messages. parts: content that is a list stays one, for images."""
    prompt: Any = written_chat(cell) if isinstance(cell, str) else cell
    if isinstance(prompt, str) and not _LIKE_CHAT.fullmatch(prompt):
        return prompt
    from fsdptrain.data.sft_forms import as_message, without_none

    messages: list[Any] = prompt if isinstance(prompt, list) else []
    if not messages or not all(
        isinstance(m, Mapping)
        and isinstance(m.get("role"), str)
        and (isinstance(m.get("content"), str | list) or m.get("tool_calls"))
        for m in messages
    ):
        raise DataError(
            f"--input-key {column}: row {row_id}, counted from 0, holds {str(prompt)[:80]!r}; "
            "a prompt is a text or a list of messages with role and content"
        )
    try:
        return [as_message(message, parts=parts) for message in without_none(messages)]
    except DataError as error:
        raise DataError(f"--input-key {column}: row {row_id}, counted from 0: {error}") from error


def _check_column(option: str, column: str, row: Mapping[str, Any], *, where: str) -> None:
    if not _may_hold(row, column) and not (option == "--label-key" and column == ""):
        none = ', or --label-key "" if there are no labels' if option == "--label-key" else ""
        fix = f"set it to one of {', '.join(row)}{none}" if row else "its first row is empty"
        raise DataError(f"{option} {column!r} is not a column of {where}{suggest(column, row)}; {fix}")


def _may_hold(row: Mapping[str, Any], column: str) -> bool:
    """Return whether rows like `row` have `column`, or `column.key` in a column of mappings, which may be null here."""
    found: Any = row if column not in row else None
    for key in column.split("."):
        if found is None:
            return True
        if not isinstance(found, Mapping) or key not in found:
            return False
        found = found[key]
    return True


def is_data_file(name: str, flag: str) -> bool:
    """Return whether `name` is a file of rows, not a folder or a data set of the hub.

    Raises DataError for a file that does not exist, is empty, or has an unknown format.
    """
    path = Path(name)
    is_file = path.suffix in FILE_FORMATS
    if is_file and not path.is_file():
        raise DataError(f"{flag} {name}: file not found")
    if path.is_file() and not is_file:
        raise DataError(f"{flag} {name}: its name must end in {', '.join(FILE_FORMATS)}; convert it with `datasets`")
    if is_file and path.stat().st_size == 0:
        raise DataError(f"{flag} {name} has no rows: the file is empty")
    return is_file


def load_table(name: str, options: dict[str, Any], *, flag: str) -> "Table | datasets.Dataset":
    """Load a file, a folder, or a data set of the hub. options: of `datasets.load_dataset`."""
    import datasets  # lazy: takes 1 s

    path, is_file = Path(name), is_data_file(name, flag)
    known = () if is_file else ("name", "split", "revision", "data_dir")
    for option in options:
        if option not in known:
            takes = f"it takes {', '.join(known)}" if known else "a file takes none"
            raise ConfigError(f"{flag} {name}: no option {option!r}; {takes}")
    with _readable(name, flag):
        if is_file:
            datasets.disable_progress_bars()  # reading a local file is fast
            form = FILE_FORMATS[path.suffix]
            if form == "json":
                return _load_json(path, flag)
            if form == "csv":
                return _load_csv({"train": [name]}, "train")
            return datasets.load_dataset(form, data_files=name, split="train")
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return _load_saved(path, options, flag)
        options = {"split": "train", **options}
        files = [file for file in path.rglob("*") if file.suffix in FILE_FORMATS] if path.is_dir() else []
        if len(forms := {FILE_FORMATS[file.suffix] for file in files}) > 1:
            log.warning("%s %s has %s files: `datasets` reads only one form", flag, path, " and ".join(forms))
        if forms == {"csv"}:
            split = str(options.pop("split"))
            builder = datasets.load_dataset_builder(name, **options)
            return _load_csv(builder.config.data_files or {}, split)
        return datasets.load_dataset(name, **options)


def _load_json(path: Path, flag: str) -> Table:
    """Read a file of JSON lines, or of one list. Values are what the file says.

    `datasets` makes times of texts that look like dates, and floats of integers beside a float. Raises DataError with
    the line that is not an object.
    """
    with path.open("rb") as file:
        if file.read(4096).removeprefix(BOM_UTF8).lstrip()[:1] == b"[":
            found = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_as_object)
            return JsonRows((json.dumps(row).encode() for row in found), path, flag)
        file.seek(0)
        return JsonRows(file, path, flag)


def _as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for a key that it has twice, of which json keeps the last one."""
    _refuse_twice([name for name, _ in pairs], "an object")
    return dict(pairs)


def _refuse_twice(names: Sequence[str], what: str) -> None:
    if len(set(names)) < len(names):
        raise ValueError(f"{what} has {next(name for name in names if names.count(name) > 1)!r} twice")


class JsonRows:
    """The rows of JSON lines that are not empty, as text until they are read. A row has the columns of all rows."""

    def __init__(self, lines: Iterable[bytes], path: Path, flag: str) -> None:
        self._lines: list[bytes] = []
        self._columns: dict[str, None] = {}
        for number, line in enumerate(lines, 1):
            try:
                text = line.removeprefix(BOM_UTF8).decode().strip()
                row = json.loads(text, object_pairs_hook=_as_object) if text else None
            except (ValueError, RecursionError) as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else first_line(error)
                raise DataError(f"{flag} {path}:{number} is not JSON: {reason}") from error
            if text and not isinstance(row, dict):
                raise DataError(f"{flag} {path}:{number} holds {text[:40]}, not an object, a value per column")
            if row is not None:
                self._columns |= dict.fromkeys(row)
                self._lines.append(text.encode())

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {**self._columns, **json.loads(self._lines[index])}


def _load_csv(files: Mapping[Any, Sequence[str]], split: str) -> "datasets.Dataset":
    """Read the csv files of `split`, which may name several, as text. files: by split."""
    import datasets

    read = {str(name): list(paths) for name, paths in files.items() if re.search(rf"\b{name}\b", split)}
    if not read:
        raise ValueError(f"it has no split {split}, only {', '.join(map(str, files))}")
    (first, text), *others = [(path, _as_text(Path(path))) for paths in read.values() for path in paths]
    if other := next((path for path, found in others if found != text), None):
        raise ValueError(f"{Path(first).name} and {Path(other).name} differ in their columns: make them equal")
    return datasets.load_dataset("csv", data_files=read, split=split, **text)


def csv_columns(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        return next(filter(None, csv.reader(file)), [])


def _as_text(path: Path) -> dict[str, Any]:
    """Return options of `load_dataset` for the text of all csv cells; by default `None` is null and 3 may be 3.0."""
    import datasets
    import pandas

    _refuse_twice([name for name in csv_columns(path) if name], path.name)
    columns = pandas.read_csv(path, nrows=0).columns
    features = datasets.Features({str(column): datasets.Value("string") for column in columns})
    return {"keep_default_na": False, "index_col": False, "features": features}  # else more cells shift all columns


@contextmanager
def _readable(name: str, flag: str) -> Iterator[None]:
    """Raise the errors of `datasets` as DataError, in one line."""
    from datasets.exceptions import DatasetsError

    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # its errors are raised here
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Length of header", category=Warning)  # of pandas: lost cells
            yield
    except (OSError, ValueError, KeyError, RuntimeError, StopIteration, csv.Error, DatasetsError) as error:
        if isinstance(error, ConfigError):
            raise
        cause = error.__cause__ or error
        raise DataError(f"{flag} {name} cannot be read: {first_line(cause)}") from error
    finally:
        logger.setLevel(level)


def _load_saved(path: Path, options: dict[str, Any], flag: str) -> "datasets.Dataset":
    """Load a directory of `save_to_disk`: one data set, or one per split."""
    import datasets

    saved = datasets.load_from_disk(str(path))
    known = {"split"} if isinstance(saved, datasets.DatasetDict) else set()
    if unknown := options.keys() - known:
        raise ConfigError(f"{flag} {path}: it was written by save_to_disk and has no {', '.join(sorted(unknown))}")
    if isinstance(saved, datasets.Dataset):
        return saved
    split = options.get("split", "train")
    if split not in saved:
        raise DataError(f"{flag} {path}?split={split}: it has only {', '.join(map(str, saved))}")
    return saved[split]


def plain(value: Any) -> Any:
    """Return nested data with arrays and tensors, of `datasets` in another format, as Python values."""
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value.tolist() if hasattr(value, "tolist") else value


def written_chat(text: str) -> Any:
    """Return the messages that a cell of a CSV file holds as JSON, or the text itself."""
    if _LIKE_CHAT.fullmatch(text):
        with suppress(ValueError, RecursionError):
            found = json.loads(text)
            if all(isinstance(message, dict) and "role" in message for message in found):
                return found
    return text


def value_in(values: Mapping[str, Any], column: str) -> Any:
    """Return the value of `column`, or of `column.key` in a column of mappings. None if there is no such value."""
    if column in values:
        return values[column]
    found: Any = values
    for key in column.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
