"""Rows that are held out for evaluations."""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdptrain.data.rows import Row, Rows, content_hash
from fsdptrain.errors import DataError


def split_rows(rows: Rows, eval_size: int, seed: int) -> tuple[Rows, list[Row]]:
    """Split into training rows and up to `eval_size` distinct held-out rows, drawn by `seed`.

    Generators may repeat a question at other indices. Pass `content_hash` of the held-out rows to PromptStream, which
    skips duplicates of them. Raises DataError if no training rows are left.
    """
    import torch  # lazy: columns are checked before torch is imported

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
            f"--eval-size {eval_size} leaves no training rows, the data has {len(rows)} rows; "
            "lower it, or set --eval-prompt-data"
        )
    return _Subset(rows, [index for index in range(len(rows)) if index not in taken]), list(held_out.values())


@dataclass(frozen=True)
class _Subset:
    """Subset of rows, in the order of `indices`."""

    rows: Rows
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Row:
        return self.rows[self.indices[index]]
