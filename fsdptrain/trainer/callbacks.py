"""Callbacks of a run from Python."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsdptrain.types import Metrics, Sample

if TYPE_CHECKING:
    from fsdptrain.trainer.trainer import Trainer


class Callback:
    """Base class for `Trainer(config, callbacks=[...])`. Override the methods that you need.

    Every rank calls them, at the same point. `trainer.stop(reason)` ends the run after the current step;
    `trainer.model`, `trainer.tokenizer`, `trainer.generate` and `trainer.folder` may be used, the collective ones on
    every rank. An exception ends the run.
    """

    def on_rollout(self, trainer: "Trainer", samples: Sequence[Sample]) -> None:
        """Called with the samples of this rank, with rewards and advantages, before the optimizer steps."""

    def on_step(self, trainer: "Trainer", metrics: Metrics) -> None:
        """Called after the optimizer steps of a rollout, with all its metrics, which are equal on all ranks."""

    def on_eval(self, trainer: "Trainer", metrics: Metrics) -> None:
        """Called after an evaluation, with its metrics."""

    def on_save(self, trainer: "Trainer", folder: Path) -> None:
        """Called after a checkpoint, with its folder. With --async-save it may not be complete yet."""
