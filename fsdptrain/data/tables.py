"""Rows of tables: files, folders and hub data sets, read by `datasets`; lists of mappings, environments."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptrain.config import DataConfig
from fsdptrain.config.sft import SftConfig
from fsdptrain.data.images import as_images
from fsdptrain.data.rows import Row, Rows, Table, value_in
from fsdptrain.data.sources import first_line
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.registry import suggest
from fsdptrain.types import Message

if TYPE_CHECKING:
    import datasets

ReadRow = Callable[[Mapping[str, Any], str], Row]  # (values by column, id of the row)
_NO_TOOLS = ("", "None", "none", "null", "[]", "{}")  # also as JSON text
FILE_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
COLUMN_OPTIONS = ("input_key", "label_key")  # after the ?, of one source


def load_table_rows(
    name: str,
    options: dict[str, Any],
    data: DataConfig,
    *,
    flag: str,
    image_key: str | None,
    sft: SftConfig | None = None,
) -> Rows:
    """Load the table `name`: a file, a folder, or a data set of the hub.

    options: of `datasets.load_dataset`, and the names of columns, which override those of `data`.
    """
    data, options = split_options(data, options)
    table, path = load_table(name, options, data, flag=flag), Path(name)
    name = path.name if path.exists() else name
    return as_rows(table, data, name=name, flag=flag, folder=folder_of(path), image_key=image_key, sft=sft)


def split_options(data: DataConfig, options: Mapping[str, Any]) -> tuple[DataConfig, dict[str, Any]]:
    """Return `data` with the columns that `options` name, and the other options."""
    columns = {name: str(value) for name, value in options.items() if name in COLUMN_OPTIONS}
    others = {name: value for name, value in options.items() if name not in columns}
    return data.model_copy(update=columns), others


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
    if len(dataset) == 0:
        raise DataError(f"{flag} {name} has no rows; check the file and --prompt-split {data.prompt_split}")
    first = _read(dataset, 0, name)
    if isinstance(first, Row):
        return dataset  # type: ignore[return-value]  # a sequence of Row by its first element
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

        read = form_reader(first, data, sft, where=where)
        if read is not None:
            return read
    for option, column in (("--input-key", data.input_key), ("--label-key", data.label_key)):
        _check_column(option, column, first, where=where)
    if data.metadata_key is not None:
        _check_column("--metadata-key", data.metadata_key, first, where=where)
    if image_key is not None:
        _check_column("--image-key", image_key, first, where=where)
    columns = _Columns(data.input_key, data.label_key, data.metadata_key, image_key, folder)
    if sft is None or image_key is not None:
        return columns
    from fsdptrain.data.sft_forms import usable_or_marked

    return usable_or_marked(columns)


def environment_rows(dataset: Sequence[Mapping[str, Any]]) -> Rows:
    """Return the rows of an environment: mappings with prompt, optional label and optional metadata."""
    if len(dataset) == 0:
        raise DataError("--prompt-data environment has no rows: the environment's dataset() is empty")
    _check_column("dataset()", "prompt", dataset[0], where="--prompt-data environment")
    return _TableRows(dataset, "environment", _Columns("prompt", "label", "metadata"))


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


@dataclass(frozen=True)
class _Columns:
    """Converts rows by column names. `label_key` "": no labels. `metadata_key` None: all columns but images."""

    input_key: str
    label_key: str
    metadata_key: str | None
    image_key: str | None = None
    folder: Path = Path()

    def __call__(self, values: Mapping[str, Any], row_id: str) -> Row:
        if str(values.get("tools")).strip() not in _NO_TOOLS and self.metadata_key != "tools":
            raise DataError(
                f"row {row_id} has a column `tools`, which no prompt would show: write the tools into the system "
                "message, or remove or rename the column"
            )
        return Row(
            id=row_id,
            prompt=_checked_prompt(value_in(values, self.input_key), row_id, self.input_key),
            label=value_in(values, self.label_key) if self.label_key else None,
            metadata=_checked_metadata(values, row_id, self.metadata_key, self.image_key),
            images=as_images(values.get(self.image_key), self.folder) if self.image_key else (),
        )


def _read(table: Any, index: int, name: str) -> Any:
    try:
        return table[index]
    except UnicodeDecodeError as error:  # `datasets` decodes a row when it is read
        raise DataError(f"row {name}:{index}, counted from 0, is not text in UTF-8: {error}") from error


def folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent if path.is_file() else Path()


def _checked_prompt(prompt: Any, row_id: str, column: str) -> str | list[Message]:
    if isinstance(prompt, str):
        return prompt
    is_chat = isinstance(prompt, list) and prompt and all(isinstance(m, Mapping) for m in prompt)
    if not is_chat or not all(
        isinstance(m.get("role"), str) and isinstance(m.get("content"), str | list) for m in prompt
    ):
        raise DataError(
            f"--input-key {column}: row {row_id}, counted from 0, holds {str(prompt)[:80]!r}; "
            "a prompt is a text or a list of messages with role and content"
        )
    return prompt


def _checked_metadata(
    values: Mapping[str, Any], row_id: str, column: str | None, image_key: str | None
) -> Mapping[str, Any]:
    if column is None:
        return {name: value for name, value in values.items() if name != image_key}
    found = value_in(values, column) or {}
    if not isinstance(found, Mapping):
        raise DataError(
            f"--metadata-key {column}: row {row_id}, counted from 0, holds {found!r:.80}, not a "
            "mapping: store an object, not its JSON text"
        )
    return found


def _check_column(option: str, column: str, row: Mapping[str, Any], *, where: str) -> None:
    if not _may_hold(row, column) and not (option == "--label-key" and column == ""):
        none = ', or --label-key "" if there are no labels' if option == "--label-key" else ""
        raise DataError(
            f"{option} {column!r} is not a column of {where}{suggest(column, row)}; "
            f"set it to one of {', '.join(row)}{none}"
        )


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


def load_table(name: str, options: dict[str, Any], data: DataConfig, *, flag: str, streaming: bool = False) -> Any:
    """Load a `datasets.Dataset`. streaming: an IterableDataset, which is read while it is iterated."""
    import datasets  # lazy: takes 1 s

    path, is_file = Path(name), is_data_file(name, flag)
    known = () if is_file else ("name", "split", "revision", "data_dir")
    for option in options:
        if option not in known:
            takes = ", ".join((*known, *COLUMN_OPTIONS))
            raise ConfigError(f"{flag} {name}: no option {option!r}; it takes {takes}")
    with readable(name, flag):
        if is_file:
            form = FILE_FORMATS[path.suffix]
            if form == "json":
                _check_begin(path, where=f"{flag} {name}")
            datasets.disable_progress_bars()  # reading a local file is fast
            text = _as_text(path) if form == "csv" else {}
            return datasets.load_dataset(form, data_files=name, split="train", streaming=streaming, **text)
        options = {"split": data.prompt_split, **options}
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            saved = _load_saved(path, options["split"])
            return saved.to_iterable_dataset() if streaming else saved
        files = [file for file in path.rglob("*") if file.suffix in FILE_FORMATS] if path.is_dir() else []
        text = _as_text(files[0]) if {file.suffix for file in files} == {".csv"} else {}
        return datasets.load_dataset(name, **options, streaming=streaming, **text)


def _as_text(path: Path) -> dict[str, Any]:
    """Return options of `load_dataset` for the text of all csv cells; by default `None` is null and 3 may be 3.0."""
    import datasets
    import pandas

    columns = pandas.read_csv(path, nrows=0).columns
    features = datasets.Features({str(column): datasets.Value("string") for column in columns})
    return {"keep_default_na": False, "features": features}


@contextmanager
def readable(name: str, flag: str = "--prompt-data") -> Iterator[None]:
    """Raise the errors of `datasets` as DataError, in one line."""
    from datasets.exceptions import DatasetsError

    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # its errors are raised here
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, DatasetsError) as error:
        if isinstance(error, ConfigError):
            raise
        cause = error.__cause__ or error
        raise DataError(f"{flag} {name} cannot be read: {first_line(cause)}") from error
    finally:
        logger.setLevel(level)


def _check_begin(path: Path, *, where: str) -> None:
    """Raise DataError for a JSON file that begins with null, which crashes pyarrow, or nests so deep that it hangs."""
    with path.open("rb") as file:
        lines = (line.removeprefix(b"\xef\xbb\xbf").strip() for line in iter(lambda: file.readline(1 << 20), b""))
        first = next(filter(None, lines), b"")
    if first[:1] not in (b"", b"{", b"["):
        raise DataError(f"{where} cannot be read: it begins with {first[:20]!r}, which is not JSON objects")
    try:
        json.loads(first)
    except RecursionError:
        raise DataError(f"{where} cannot be read: its first row is nested too deep") from None
    except ValueError:  # an object on several lines; pyarrow decides
        return


def _load_saved(path: Path, split: str) -> "datasets.Dataset":
    """Load a directory of `save_to_disk`: one data set, or one per split."""
    import datasets

    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.Dataset):
        return saved
    if split not in saved:
        raise DataError(f"--prompt-split {split} is not in {path}; it has {', '.join(map(str, saved))}")
    return saved[split]
