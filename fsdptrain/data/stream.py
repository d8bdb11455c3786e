"""What a run reads prompts from: one stream, or several."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fsdptrain.types import Metrics, Prompt

if TYPE_CHECKING:
    from fsdptrain.data.prompts import PromptStream


class PromptSource(Protocol):
    """Infinite stream of prompts. All ranks make the same calls. See PromptStream."""

    @property
    def name(self) -> str:
        """--prompt-data, for messages."""
        ...

    @property
    def parts(self) -> "Sequence[PromptStream]":
        """Streams of one source each."""
        ...

    @property
    def progress(self) -> float: ...

    @property
    def num_too_long(self) -> int: ...

    def count_too_long(self, count: int) -> None:
        """Add rows that were skipped outside of the stream to `num_too_long`."""
        ...

    def next(self, n: int) -> list[Prompt]: ...

    def record(self, prompt: Prompt) -> None: ...

    def metrics(self) -> Metrics: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
