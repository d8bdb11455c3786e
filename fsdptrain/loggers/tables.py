"""Samples as a table, for dashboards."""

from collections.abc import Mapping, Sequence
from typing import Any

PER_TOKEN = ("tokens", "rollout_logprobs", "logprobs", "advantages")  # only for samples.jsonl: `fsdptrain watch`


def sample_table(samples: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows. Numbers stay numbers; other values become text, because a column has one type."""
    columns = [name for name in dict.fromkeys(name for sample in samples for name in sample) if name not in PER_TOKEN]
    return columns, [[_cell(sample.get(column)) for column in columns] for sample in samples]


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float) else str(value)
