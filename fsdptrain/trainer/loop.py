"""The training loop: rollouts in, optimizer steps, weights back to the engine."""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from fsdptrain.algo.advantages import AdvantageRule, scale_over_batch
from fsdptrain.config import Config
from fsdptrain.data.packing.pack import drop_overlong
from fsdptrain.data.prompts import PromptStream
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import RolloutError
from fsdptrain.rollout.weight_sync.sync import WeightSync
from fsdptrain.trainer import metrics
from fsdptrain.trainer.batches import PackingRules, StepBatches, in_epochs, pack_rollout
from fsdptrain.trainer.logprobs import compute_logprobs
from fsdptrain.trainer.phases import Phases, step_profiler
from fsdptrain.trainer.progress import Progress
from fsdptrain.trainer.reporting import Reporter
from fsdptrain.trainer.run_dir import EXPORT, RunFolder
from fsdptrain.trainer.samples.source import RolloutBatch, RolloutSource
from fsdptrain.trainer.shown import sample_rows
from fsdptrain.trainer.stopping import StopRequest
from fsdptrain.types import Metrics

if TYPE_CHECKING:
    from fsdptrain.protocols import Loss, TrainBackend
    from fsdptrain.trainer.evaluation import Evaluation
    from fsdptrain.trainer.samples.recorded import RecordingSource
    from fsdptrain.trainer.samples.sft import SftSource
    from fsdptrain.trainer.sft_evaluation import LossEvaluation
    from fsdptrain.trainer.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrainingLoop:
    """An open run: what it owns, and the algorithm. Every method is collective."""

    config: Config  # resolved
    run_folder: RunFolder
    tokenizer: PreTrainedTokenizerBase
    stream: PromptStream
    source: "RolloutSource | RecordingSource | SftSource"
    loss: "Loss"
    advantages: AdvantageRule
    backend: "TrainBackend"
    weight_sync: WeightSync | None  # with the engine; None: the run never generates
    evaluation: "Evaluation | LossEvaluation | None"
    phases: Phases
    report: Reporter
    trainer: "Trainer"  # for callbacks
    stop: StopRequest
    stopped: str = ""  # why the run has ended early
    stop_signal: int | None = None  # which signal has ended it
    exported: Path | None = None
    asleep: bool = False  # the engine, between a rollout and the next sync

    def __post_init__(self) -> None:
        config, backend = self.config, self.backend
        self._rules = PackingRules.of(config, layout=backend.layout_probe.layout, features=backend.features)
        self._profiler = step_profiler(config, self.folder)
        self._progress = Progress(config, self.run_folder, backend=backend, stream=self.stream, report=self.report)

    @property
    def step(self) -> int:
        """Rollouts that were trained on; also the version of the policy."""
        return self._progress.step

    @property
    def folder(self) -> Path:
        return self.run_folder.path

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and value of the best evaluation; see --eval-metric."""
        return self._progress.evaluations and self._progress.evaluations.best

    @property
    def metrics(self) -> Metrics:
        """The last value of every metric."""
        return self.report.last

    def run(self) -> None:
        """Train until --num-rollout, or until a request to stop; `stopped` then has the reason."""
        self.stopped, self.stop_signal = self._progress.observe({}), None  # of the checkpoint, from which it resumes
        self.run_folder.start(self.config, self.step)
        if 0 < self.config.run.num_rollout <= self.step:
            count = f"step {self.step} of --num-rollout {self.config.run.num_rollout}"
            log.info("nothing to train: %s; fsdptrain report %s has the results", count, self.folder)
        elif not self.stopped:
            self._push_weights()
            self._start_rollouts()
        if (self.step == 0 and not self.stopped) or not self.config.run.num_rollout:
            self.stop.ask(self._progress.observe(self.evaluate()))
        with self._progress.checkpoints or nullcontext() as checkpoints:
            while self.step < self.config.run.num_rollout and not self._must_stop():
                with self._profiler(self.step + 1):
                    self._train_on_rollout()
                self._progress.require_an_update()
                if checkpoints is not None:
                    checkpoints.check()
                ends = self._progress.is_last or (self._must_stop() and self.stop_signal is None)
                if ends or (self._progress.is_evaluation_due and not self.stopped):
                    self.stop.ask(self._progress.observe(self.evaluate()))
                if self._progress.is_checkpoint_due:
                    self._save()
            if self.stopped:
                self._save_early()
            if self.config.run.export and self.stop_signal is None:
                with self.phases("save"):
                    self.backend.export(self.folder / EXPORT)
                self.exported = self.folder / EXPORT
        if self._progress.evaluations is not None:
            self._progress.evaluations.tell_best(self.folder)

    def _must_stop(self) -> bool:
        if not self.stopped and (request := self.stop.of_ranks()):
            self.stopped, self.stop_signal = request
        return bool(self.stopped)

    def _save_early(self) -> None:
        if self.config.run.keep_last and self.step != self._progress.saved:
            self._save()
        where = f"resume from {self.folder} by the same command"
        if self._progress.observe({}):
            where = "change that option to resume"
        if not self.config.run.keep_last:
            where = "without a checkpoint (--keep-last 0)"
        log.warning("stopped: %s, after step %d of %d; %s", self.stopped, self.step, self.config.run.num_rollout, where)

    def _train_on_rollout(self) -> None:
        """One rollout and its optimizer steps."""
        with self.phases.rollout():
            rollout = self._collect()  # generate, compute rewards and advantages
            self._call("on_rollout", rollout.samples)
            steps = pack_rollout(self.config, rollout, self._rules, self.step)  # as many packs on every rank
            with self.phases("logprobs"):  # of the old policy and the reference, before the first update
                steps = compute_logprobs(self.config, self.backend, steps)
            steps = in_epochs(steps, self.config.batch.epochs_per_rollout, seed=f"{self._rules.seed}/{self.step}")
            trained = self._optimize(steps)
            self._progress.step += 1
            if self.weight_sync is not None:
                self.weight_sync.observe(trained)
            self._push_weights()  # to the engine, then verify
            self._start_rollouts()
        values = self.report.step(rollout, steps, self.phases, self.weight_sync, trained, step=self.step)
        self._call("on_step", values)
        self.stop.ask(self._progress.observe(values))
        self.report.log_samples(sample_rows(rollout.shown, self.tokenizer, rollout.samples), "train", self.step)

    def _collect(self) -> RolloutBatch:
        """The samples of this rank, with advantages, none longer than a pack."""
        batch = self.config.batch
        with self.phases("collect"):
            rollout = self.source.collect(self.step)
            with raise_on_all_ranks(RolloutError, "rollout"):
                kept, dropped = drop_overlong(
                    rollout.samples, max_tokens=self._rules.max_tokens, overlong_samples=batch.overlong_samples
                )
                if self.weight_sync is not None:
                    self.weight_sync.engine.sleep()
                    self.asleep = True
        self.phases.seconds.update(rollout.seconds)
        self.phases.seconds["idle"] = self.phases.seconds["collect"] if self.source.in_flight else 0.0
        if rollout.results is not None:  # after `raise_on_all_ranks`: it is collective
            kept = scale_over_batch(kept, self.advantages, metrics.reduce_sums)
        return replace(rollout, samples=kept, num_dropped=rollout.num_dropped + dropped)

    def _optimize(self, steps: Sequence[StepBatches]) -> Metrics:
        with self.phases("train"):
            found = [self.backend.train_step(step.packs, self.loss, self.config.algorithm) for step in steps]
            self._progress.num_updates += sum("optim/grad_norm" in values for values in found)
            return metrics.mean_metrics(found, [step.packs[0].num_trained_tokens for step in steps])

    def _push_weights(self) -> None:
        """If the engine generates before the next optimizer step; else it stays asleep."""
        generates = self.config.algorithm.algorithm != "sft" and self.step < self.config.run.num_rollout
        evaluates = self.evaluation is not None and self._progress.is_evaluation_due
        if self.weight_sync is not None and (generates or evaluates):
            self.weight_sync.push(self.step, self.phases)
            self.asleep = False

    def _start_rollouts(self) -> None:
        """Start the rollouts that the new weights allow."""
        if self.step < self.config.run.num_rollout:
            self.source.run_ahead(self.step)

    def evaluate(self) -> Metrics:
        if self.evaluation is None:
            return {}
        with self.phases("eval"):
            values, shown = self.evaluation.run()
        self.report.log(values, self.step)
        self.report.log_samples(sample_rows(shown, self.tokenizer), "heldout", self.step)
        self._call("on_eval", values)
        return values

    def _call(self, method: str, argument: Any) -> None:
        for callback in self.trainer.callbacks:
            getattr(callback, method)(self.trainer, argument)

    def _save(self) -> None:
        """With --offload-train the engine sleeps meanwhile, and gets its weights once more afterwards."""
        with self.phases("save"):
            written = self._progress.save()
        if written is not None:
            self._call("on_save", written)
        if self.config.sync.offload_train and self.step < self.config.run.num_rollout:
            self._push_weights()
