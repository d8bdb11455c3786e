"""Prompts of a stream: rows are read in order while training, and shuffled in blocks.

A block of --prompt-data-buffer rows is read and permuted by a seed of its epoch and number. A checkpoint holds the
state of the reader (`IterableDataset.state_dict`) before the current block and before each block with pending prompts.
A resumed stream reads these blocks once more, so it continues with exactly the same prompts. The shuffle of `datasets`
itself loses the rows in its buffer when it resumes.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from fsdptrain.config import DataConfig, RolloutConfig
from fsdptrain.config.sft import SftConfig
from fsdptrain.data.prompts import MOST_UNUSABLE, PromptStream, permutation
from fsdptrain.data.rows import Row
from fsdptrain.data.sources import parse_options
from fsdptrain.data.tables import ReadRow, folder_of, load_table, readable, row_reader, split_options
from fsdptrain.errors import DataError
from fsdptrain.protocols import PromptProcessor
from fsdptrain.types import Prompt

if TYPE_CHECKING:
    import datasets

Block = tuple[int, int]  # epoch, number within the epoch
_NO_ROWS: Sequence[Row] = ()


@dataclass(frozen=True)
class RowStream:
    """Rows of a table that is read in order. They are counted from `start`, the number of rows that are held out."""

    table: "datasets.IterableDataset"
    read: ReadRow
    name: str
    start: int = 0

    def row(self, values: Mapping[str, Any], index: int) -> Row:
        return self.read(values, f"{self.name}:{self.start + index}")

    def first(self, count: int) -> list[Row]:
        """Return up to `count` rows."""
        return [self.row(values, index) for index, values in enumerate(islice(iter(self.table), count))]

    def split(self, count: int) -> "tuple[RowStream, list[Row]]":
        """Return the stream without the first `count` rows, and these rows."""
        held_out = self.first(count)
        if count and len(held_out) < count:
            raise DataError(
                f"--eval-size {count} leaves no training rows, the data has {len(held_out)} rows; "
                "lower it, or set --eval-prompt-data"
            )
        return replace(self, table=self.table.skip(count), start=self.start + count), held_out


def open_stream(data: DataConfig, *, image_key: str | None, sft: SftConfig | None) -> RowStream:
    """Open the table of --prompt-data as a stream. Raises DataError if it has no rows."""
    spec, _, query = data.data_name.partition("?")
    data, options = split_options(data, parse_options(query, flag="--prompt-data"))
    table, path = load_table(spec, options, data, flag="--prompt-data", streaming=True), Path(spec)
    name = path.name if path.exists() else spec
    with readable(name):
        first = next(iter(table.take(1)), None)  # `iter(table)` would move the state of the table
    if first is None:
        raise DataError(f"--prompt-data {name} has no rows; check the file and --prompt-split {data.prompt_split}")
    where = f"--prompt-data {name}"
    return RowStream(
        table, row_reader(first, data, where=where, folder=folder_of(path), image_key=image_key, sft=sft), name
    )


class StreamedPrompts(PromptStream):
    """Infinite stream of prompts of a table without a length. For options, see PromptStream."""

    def __init__(
        self,
        rows: RowStream,
        tokenizer: PreTrainedTokenizerBase,
        *,
        data: DataConfig,
        rollout: RolloutConfig,
        exclude: Collection[str] = (),
        max_prompt_len: int | None = None,
        processor: PromptProcessor | None = None,
        make: Callable[..., Prompt] | None = None,
    ) -> None:
        options = {"data": data, "rollout": rollout, "exclude": exclude, "max_prompt_len": max_prompt_len}
        super().__init__(_NO_ROWS, tokenizer, **options, processor=processor, make=make)
        self._table = rows.table
        self._source = rows
        self._size = data.prompt_data_buffer
        self._first_state = self._table.state_dict()  # before the first row of an epoch
        self._states: dict[Block, dict[str, Any]] = {(0, 0): self._first_state}  # before each block that is needed
        self._block: Block | None = None  # the block in `_values`, which `_iterator` has just read
        self._values: list[Mapping[str, Any]] = []
        self._iterator: Iterator[Mapping[str, Any]] = iter(())
        self._epoch_len = 0  # rows; 0: unknown

    @property
    def progress(self) -> float:
        """Completed epochs. The length of an epoch is unknown."""
        return float(self.epoch)

    def first_row(self) -> Row:
        row = self._source.first(1)[0]
        self._table.load_state_dict(self._first_state)
        return row

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        current = (self.epoch, self.position // self._size)
        needed = {current, *((epoch, row // self._size) for epoch, row in state.get("pending", ()))}
        blocks = [[*block, self._states[block]] for block in sorted(needed) if block in self._states]
        return state | {"buffer": self._size, "blocks": blocks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Blocks of pending prompts are read again when these are returned."""
        if state.get("buffer") != self._size:
            raise DataError(
                f"--prompt-data-buffer {self._size} differs from that of the checkpoint, {state.get('buffer')}: resume "
                "with the same value, or use --resume never"
            )
        super().load_state_dict({**state, "num_rows": 0})
        self._states = {(epoch, number): found for epoch, number, found in state["blocks"]}
        self._block = None

    def _next_place(self) -> tuple[int, int]:
        block = (self.epoch, self.position // self._size)
        self._load(block)
        if self.position % self._size >= len(self._values):
            if self.position == 0:
                raise DataError(f"--prompt-data {self.data.data_name} has no rows")
            self._epoch_len = self.position
            self.epoch, self.position = self.epoch + 1, 0
            block = (self.epoch, 0)
            self._states.setdefault(block, self._first_state)
            self._load(block)
        key = f"{self.seed}:{self.epoch}:{block[1]}" if self.shuffle else None
        order = permutation(len(self._values), key)
        index = block[1] * self._size + int(order[self.position % self._size])
        self.position += 1
        return self.epoch, index

    def _row(self, epoch: int, index: int) -> Row:
        self._load((epoch, index // self._size))
        return self._source.row(self._values[index % self._size], index)

    def _load(self, block: Block) -> None:
        """Read the rows of a block, and the state after it."""
        if block == self._block:
            return
        if self._block is None or block != (self._block[0], self._block[1] + 1):
            self._table.load_state_dict(self._states[block])
            self._iterator = iter(self._table)
        with readable(self._source.name):
            self._values = list(islice(self._iterator, self._size))
        self._block = block
        self._states[block[0], block[1] + 1] = self._table.state_dict()
        needed = {(epoch, row // self._size) for epoch, row in (*self._pending.values(), *self._resumed)}
        self._states = {other: state for other, state in self._states.items() if other >= block or other in needed}

    @property
    def _rows_per_epoch(self) -> float:
        return self._epoch_len or math.inf

    def _most_unusable(self) -> float:
        return min(math.inf if self._has_given else MOST_UNUSABLE, 2 * self._rows_per_epoch)
