"""Protocols of engines that keep requests across weight syncs (--max-staleness, agents)."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from fsdptrain.protocols import RolloutEngine
from fsdptrain.types import Completion, Prompt, SamplingParams


@runtime_checkable
class InFlightEngine(RolloutEngine, Protocol):
    """An engine that keeps requests across weight syncs (--max-staleness)."""

    def generate_in_flight(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Generate like `generate`, from any thread except the trainer's, and across `update_weights` calls.

        Each token is sampled with the weights that the engine holds at that moment; `Completion.versions` records them.
        Not collective. Raises RolloutError after the engine is closed.
        """
        ...


@runtime_checkable
class SteppedEngine(InFlightEngine, Protocol):
    """An in-flight engine in the trainer's process, which generates only within `work` and `generate`."""

    @property
    def keeps_requests(self) -> bool:
        """Whether requests can continue after `update_weights`. If not, `generate_in_flight` must not be used."""
        ...

    def submit(self, prompt: Prompt, sampling: SamplingParams) -> list[Future[Completion]]:
        """Request `num_samples` completions, from any thread. They fail with RolloutError if the engine is closed."""
        ...

    def work(self, *, until: Callable[[], bool], seconds: float = math.inf) -> None:
        """Generate on this thread until the condition holds or the time is over; wait if there are no requests."""
        ...
