"""Rows of a data set: one example each."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fsdptrain.types import Message


@dataclass(frozen=True)
class Row:
    """One example of a data set."""

    id: str  # unique within its data set and stable between runs
    prompt: str | list[Message]
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[Any, ...] = ()  # unopened images: see data/images.py
    options: Mapping[str, Any] = field(default_factory=dict)  # of the section data, for this row alone


class Rows(Protocol):
    """Indexed rows, generated or read on demand. A list of rows qualifies."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


def content_hash(row: Row) -> str:
    """Hash the prompt and images of a row, ignoring id, label and form (a string equals one user message)."""
    messages = as_messages(row.prompt)
    content = [[m["role"], c.strip() if isinstance(c := m.get("content"), str) else c] for m in messages]
    content += [m["tool_calls"] for m in messages if m.get("tool_calls")]
    if row.images:
        from fsdptrain.data.images import content_of

        content += [content_of(image) for image in row.images]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def as_messages(prompt: str | Sequence[Message]) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
