"""What a checkpoint holds beside the weights: the progress of a run. Writing and resuming it."""

import json
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fsdptrain.checkpoints import EXPORT, PROGRESS_FILE
from fsdptrain.config import Config
from fsdptrain.data.prompts import PromptStream
from fsdptrain.errors import NumericsError
from fsdptrain.trainer.reporting import Reporter
from fsdptrain.trainer.run_dir import RunFolder
from fsdptrain.types import Metrics

if TYPE_CHECKING:
    from fsdptrain.fsdp.checkpoint_folder import CheckpointFolder
    from fsdptrain.protocols import TrainBackend


class Progress:
    """How far a run is: `step` rollouts were trained on, which is also the version of the policy."""

    def __init__(
        self, config: Config, folder: RunFolder, *, backend: "TrainBackend", stream: PromptStream, report: Reporter
    ) -> None:
        self.step = 0
        self.saved: int | None = None  # step of the newest checkpoint
        self.checkpoints = _open_checkpoints(config, folder.path) if config.run.keep_last else None
        self.num_updates = 0  # optimizer steps that were not skipped
        self._inputs = folder.inputs
        self._config = config
        self._backend = backend
        self._stream = stream
        self._report = report
        self.evaluations = None
        if config.run.num_rollout and (config.evaluates or config.run.stop_when):
            from fsdptrain.trainer.best import open_evaluations

            self.evaluations = open_evaluations(config, folder)
        self._resume(folder)

    @property
    def is_last(self) -> bool:
        return self.step == self._config.run.num_rollout

    @property
    def is_evaluation_due(self) -> bool:
        """After the first and the last step, and every --eval-interval; always in a run that only evaluates."""
        run = self._config.run
        on_interval = bool(run.eval_interval and self.step % run.eval_interval == 0)
        return not run.num_rollout or self.step == 0 or self.is_last or on_interval

    @property
    def is_checkpoint_due(self) -> bool:
        run = self._config.run
        is_best = self.evaluations is not None and self.evaluations.is_kept(self.step)
        return self.is_last or is_best or bool(run.save_interval and self.step % run.save_interval == 0)

    def observe(self, values: Metrics) -> str:
        """Take metrics of this step or its evaluation, or {}. Returns the option that ends the run here, and why."""
        if self.evaluations is None:
            return ""
        reason = self.evaluations.observe(values, self.step, self._report.last)
        return reason if self.step < self._config.run.num_rollout else ""

    def require_an_update(self) -> None:
        """Raise NumericsError at the end of a run in which every optimizer step was skipped."""
        skipped = self._report.last["optim/skipped_steps"]
        if self.is_last and skipped and not self.num_updates:
            raise NumericsError(
                f"nothing was trained: gradients were not finite in all {skipped:.0f} optimizer steps; lower --lr or "
                f"--clip-grad{self._config.precision_fix}, or check --loss"
            )

    def save(self) -> Path | None:
        """Write a checkpoint. Returns its folder; None with --keep-last 0. Collective."""
        ranked = [] if self.evaluations is None else self.evaluations.ranked
        written = self.checkpoints and self.checkpoints.write(self.step, self._write, ranked=ranked)
        self.saved = self.step
        return written

    def _write(self, directory: Path) -> Future[Any] | None:
        if self._config.run.export_every_save:
            self._backend.export(directory / EXPORT)
        pending = self._backend.save(directory, self.step)
        if dist.get_rank() == 0:
            state = {"step": self.step, "totals": self._report.totals, "stream": self._stream.state_dict()}
            state |= {"num_updates": self.num_updates, "inputs": dict(self._inputs)}
            state["evaluations"] = [] if self.evaluations is None else self.evaluations.rows
            (directory / PROGRESS_FILE).write_text(json.dumps(state))
        return pending

    def _resume(self, folder: RunFolder) -> None:
        checkpoint, progress = folder.checkpoint, folder.progress
        if checkpoint is None or progress is None:
            return
        from fsdptrain.trainer.resuming import restore

        restore(checkpoint, progress, self._stream, self._report, trains=self._config.run.num_rollout > 0)
        self.step = self.saved = self._backend.load(checkpoint)
        self.num_updates = progress.get("num_updates", 1)


def _open_checkpoints(config: Config, run: Path) -> "CheckpointFolder":
    from fsdptrain.fsdp.checkpoint_folder import CheckpointFolder

    best, every, timeout_s = config.run.keep_best, config.run.keep_every, config.launch.dist_timeout
    return CheckpointFolder(run, keep_last=config.run.keep_last, keep_best=best, keep_every=every, timeout_s=timeout_s)
