"""Prompts of several sources, drawn at random by their weights."""

import hashlib
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from fsdptrain.data.prompts import PromptStream
from fsdptrain.errors import DataError
from fsdptrain.types import Metrics, Prompt


class MixedPrompts:
    """A stream of prompts of several streams.

    The source of draw k depends on the seed and on k only, so all ranks draw the same prompts, and the state of the
    choice is the number of draws. Ids begin with the name of the source. Epochs of the sources end independently.
    """

    def __init__(self, streams: Mapping[str, PromptStream], weights: Sequence[float], *, seed: int) -> None:
        self.streams = dict(streams)
        self.seed = seed
        self.num_drawn = 0
        self._names = list(streams)
        self._bounds = [bound / sum(weights) for bound in accumulate(weights)]
        self._pending: dict[str, tuple[str, Prompt]] = {}  # id -> source, prompt of its stream; in order of the draws
        self._resumed: deque[str] = deque()  # sources of the prompts that were pending at the checkpoint

    @property
    def name(self) -> str:
        """--prompt-data, for messages."""
        return " ".join(stream.name for stream in self.parts)

    @property
    def parts(self) -> Sequence[PromptStream]:
        """Streams of one source each."""
        return list(self.streams.values())

    @property
    def progress(self) -> float:
        """Epochs of the source that is furthest behind."""
        return min(stream.progress for stream in self.parts)

    @property
    def num_too_long(self) -> int:
        return sum(stream.num_too_long for stream in self.parts)

    def count_too_long(self, count: int) -> None:
        """Add rows that were skipped outside of the stream."""
        self.parts[0].count_too_long(count)

    def source_of_draw(self, number: int) -> str:
        """Return the source of a draw, counted from 0."""
        digest = hashlib.sha256(f"{self.seed}:mixture:{number}".encode()).digest()
        place = int.from_bytes(digest[:8], "big") / 2**64
        return self._names[min(bisect_right(self._bounds, place), len(self._names) - 1)]

    def next(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts, those pending at the checkpoint first."""
        return [self._next() for _ in range(n)]

    def _next(self) -> Prompt:
        if self._resumed:
            name = self._resumed.popleft()
        else:
            name = self.source_of_draw(self.num_drawn)
            self.num_drawn += 1
        [inner] = self.streams[name].next(1)
        prompt = replace(inner, id=f"{name}/{inner.id}" if name else inner.id)
        self._pending[prompt.id] = (name, inner)
        return prompt

    def record(self, prompt: Prompt) -> None:
        """Record that a returned prompt is no longer pending."""
        name, inner = self._pending.pop(prompt.id)
        self.streams[name].record(inner)

    def metrics(self) -> Metrics:
        """Return the epochs of each source."""
        return {f"source/{name}/epoch": stream.progress for name, stream in self.streams.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "num_drawn": self.num_drawn,
            "pending": [*(name for name, _ in self._pending.values()), *self._resumed],
            "sources": {name: stream.state_dict() for name, stream in self.streams.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises DataError if the sources have other names."""
        known = state.get("sources", {})
        if list(known) != self._names:
            raise DataError(
                f"--prompt-data has the sources {', '.join(self._names)}, the checkpoint {', '.join(known) or 'one'}: "
                "resume with the same sources, or use --resume never"
            )
        self.seed, self.num_drawn = state["seed"], state["num_drawn"]
        self._pending, self._resumed = {}, deque(state["pending"])
        for name, stream in self.streams.items():
            stream.load_state_dict(known[name])
