"""The training loop: rollouts in, optimizer steps, weights back to the engine."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedTokenizerBase

from fsdptrain.algo.advantages import assign_advantages, scale_over_batch
from fsdptrain.config.run import profiled
from fsdptrain.data.packing.pack import drop_overlong
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import CheckpointError, ConfigError, DataError, NumericsError, RolloutError
from fsdptrain.fsdp.checkpoint_folder import CheckpointFolder
from fsdptrain.fsdp.shard_files import ShardWrite
from fsdptrain.rank_variables import RUN_ID
from fsdptrain.trainer import metrics
from fsdptrain.trainer.batches import PackingRules, StepBatches, all_sequences, make_batches
from fsdptrain.trainer.components import Components, log
from fsdptrain.trainer.logprobs import LogprobPasses
from fsdptrain.trainer.phases import Phases
from fsdptrain.trainer.profiling import StepProfiler
from fsdptrain.trainer.reporting import Reporter
from fsdptrain.trainer.run_dir import EXPORT, PROGRESS_FILE, RunFolder
from fsdptrain.trainer.samples.source import RolloutBatch
from fsdptrain.trainer.shown import TrainedTokens, rows_without_training
from fsdptrain.trainer.stopping import StopRequest
from fsdptrain.types import Metrics, Sample

if TYPE_CHECKING:
    from fsdptrain.trainer.trainer import Trainer


class TrainingLoop:
    """An open run. Every method is collective."""

    def __init__(self, folder: RunFolder, components: Components, *, trainer: "Trainer", stop: StopRequest) -> None:
        config = components.config
        self.step = 0  # rollouts that were trained on; also the version of the policy
        self.stopped = ""  # why the run has ended early
        self.stop_signal: int | None = None  # which signal has ended it
        self.exported: Path | None = None
        self._trainer = trainer  # for callbacks
        self._stop = stop
        self._saved: int | None = None  # step of the newest checkpoint
        self._asleep = False  # the engine, between a rollout and the next sync
        self._num_updates = 0  # optimizer steps that were not skipped
        self._config = config
        self._folder = folder
        self._components = components
        self._source = components.source
        self._backend = components.backend
        self._engine = components.engine
        self._weight_sync = components.weight_sync
        self._evaluation = components.evaluation
        self._advantages = components.advantages
        self._loss = components.loss
        self._stream = components.stream
        self._tokenizer = components.tokenizer
        self._checkpoints = CheckpointFolder(
            folder.path, keep_last=config.run.keep_last, timeout_s=config.launch.dist_timeout
        )
        features = components.backend.features
        self._rules = PackingRules.of(config, layout=components.backend.layout_probe.layout, features=features)
        self._logprob_passes = LogprobPasses(config, components.backend, features)
        self._profiler = StepProfiler(profiled(config.run.profile_steps), folder.path)
        self._phases = Phases(
            components.backend,
            components.engine,
            offload=config.sync.offload_train,
            stacks=components.stacks,
            patience=0.9 * config.launch.dist_timeout,  # before a collective times out
        )
        self._report = Reporter(
            config,
            components.loggers,
            stream=components.stream,
            speed=components.speed,
            planned_memory=components.planned_memory,
        )

        self._resume()

    @property
    def folder(self) -> Path:
        return self._folder.path

    @property
    def metrics(self) -> Metrics:
        """The last value of every metric."""
        return self._report.last

    @property
    def model(self) -> nn.Module:
        return self._backend.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    def run(self) -> None:
        """Train until --num-rollout, or until a request to stop; `stopped` then has the reason."""
        self.stopped, self.stop_signal = "", None
        self._folder.write_config(self._config)
        if 0 < self._config.run.num_rollout <= self.step:
            log.info("nothing to train: step %d of --num-rollout %d", self.step, self._config.run.num_rollout)
        self._push_weights()
        self._start_rollouts()
        if self.step == 0 or not self._config.run.num_rollout:
            self._evaluate()
        with self._checkpoints:
            while self.step < self._config.run.num_rollout and not self._must_stop():
                with self._profiler(self.step + 1):
                    self._train_on_rollout()
                self._require_an_update()
                self._checkpoints.check()
                is_last = self.step == self._config.run.num_rollout
                if self._evaluation_is_due and (is_last or not self._must_stop()):
                    self._evaluate()
                if self._checkpoint_is_due:
                    self._save()
            if self.stopped:
                self._save_early()
            elif self._config.run.export:
                with self._phases("save"):
                    self._backend.export(self._folder.path / EXPORT)
                self.exported = self._folder.path / EXPORT

    def evaluate(self) -> Metrics:
        """Evaluate the current weights. Returns the metrics. Raises ConfigError if there are no held-out rows."""
        if self._evaluation is None:
            raise ConfigError("evaluate() needs held-out rows: set --eval-size or --eval-prompt-data, --eval-interval")
        with self._with_current_weights():
            self._evaluate()
        return {name: value for name, value in self._report.last.items() if name.startswith("eval/")}

    def generate(self, prompts: Sequence[str | Sequence[Mapping[str, Any]]], **sampling: Any) -> list[list[str]]:
        """Generate texts with the current weights. Raises ConfigError if the run has no engine."""
        if self._weight_sync is None:
            raise ConfigError("generate() needs an engine, which --algorithm sft has with --sft-eval-generate only")
        from fsdptrain.trainer.interactive import generate_texts

        with self._with_current_weights(), self._phases("eval"):
            return generate_texts(self._components, prompts, **sampling)

    @contextmanager
    def _with_current_weights(self) -> Iterator[None]:
        """Push the weights to the engine, if there is one. On exit it sleeps again if it slept before."""
        if self._weight_sync is not None:
            self._weight_sync.push(self.step, self._phases)
        yield
        if self._asleep and self._engine is not None:
            self._engine.sleep()

    def _must_stop(self) -> bool:
        if not self.stopped and self._stop.on_any_rank():
            self.stopped, self.stop_signal = self._stop.first_of_ranks()
        return bool(self.stopped)

    def _save_early(self) -> None:
        if self._config.run.keep_last and self.step != self._saved:
            self._save()
        where = f"resume from {self._folder.path} by the same command"
        if not self._config.run.keep_last:
            where = "without a checkpoint (--keep-last 0)"
        log.warning(
            "stopped by %s after step %d of %d: %s", self.stopped, self.step, self._config.run.num_rollout, where
        )

    def _train_on_rollout(self) -> None:
        """One rollout and its optimizer steps."""
        with self._phases.rollout():
            rollout = self._collect()  # generate, compute rewards and advantages
            self._call("on_rollout", rollout.samples)
            steps = self._pack(rollout)  # the packs of each optimizer step, equally many on every rank
            steps, kl_metrics = self._compute_logprobs(steps, rollout)  # of the old policy and the reference
            tokens = TrainedTokens(rollout.shown)
            trained = self._optimize(steps, tokens)
            self.step += 1
            self._update_reference()
            if self._weight_sync is not None:
                self._weight_sync.observe(trained)
            self._push_weights()  # to the engine, then verify
            self._start_rollouts()
        self._finish_step(rollout, steps, kl_metrics | trained)
        self._report.log_samples(tokens.rows(rollout.samples, self._tokenizer), "train", self.step)

    def _collect(self) -> RolloutBatch:
        """The samples of this rank, with advantages, none longer than a pack."""
        batch = self._config.batch
        with self._phases("collect"):
            rollout = self._source.collect(self.step)
            with raise_on_all_ranks(RolloutError, "rollout"):
                kept, dropped = drop_overlong(
                    rollout.samples, max_tokens=self._rules.max_tokens, overlong_samples=batch.overlong_samples
                )
                if self._engine is not None:
                    self._engine.sleep()
                    self._asleep = True
        self._phases.seconds.update(rollout.seconds)
        self._phases.seconds["idle"] = self._phases.seconds["collect"] if self._source.in_flight else 0.0
        if rollout.results is not None:  # after `raise_on_all_ranks`: it is collective
            kept = scale_over_batch(kept, self._advantages, metrics.reduce_sums)
        return replace(rollout, samples=kept, num_dropped=rollout.num_dropped + dropped)

    def _pack(self, rollout: RolloutBatch) -> list[StepBatches]:
        samples = all_sequences(rollout.samples)
        if self._config.shaping.mask_truncated:
            from fsdptrain.algo.shaping import without_truncated

            samples = without_truncated(samples)
        if self._config.masks_stale_tokens:
            from fsdptrain.trainer.token_metrics import without_stale_tokens

            samples = without_stale_tokens(samples, self.step - self._config.sync.max_staleness)
        steps = make_batches(samples, self._rules, rollout=self.step, images=rollout.images)
        if not steps:
            raise DataError(self._why_nothing_is_left(rollout))
        return steps

    def _compute_logprobs(self, steps: list[StepBatches], rollout: RolloutBatch) -> tuple[list[StepBatches], Metrics]:
        """Old and reference logprobs before the first update, the KL term of the reward, for all epochs."""
        with self._phases("logprobs"):
            first, later = steps[: self._rules.steps_per_epoch], steps[self._rules.steps_per_epoch :]
            first, kl_metrics = self._logprob_passes.compute(first), {}
            if self._config.algorithm.kl_reward_coef:
                from fsdptrain.trainer.kl_reward import kl_in_reward

                first, kl_metrics = kl_in_reward(
                    rollout.samples,
                    first,
                    coef=self._config.algorithm.kl_reward_coef,
                    estimator=self._config.algorithm.kl_reward_type,
                    advantages=self._new_advantages,
                )
                first = self._logprob_passes.for_loss(first)
            if later:
                from fsdptrain.trainer.epochs import carry_scores

                later = carry_scores(first, later)
            return [*first, *later], kl_metrics

    def _optimize(self, steps: Sequence[StepBatches], tokens: TrainedTokens) -> Metrics:
        with self._phases("train"):
            options = self._config.algorithm
            found = [
                self._backend.train_step(step.packs, tokens.recorded_by(self._loss, step.packs), options)
                for step in steps
            ]
            self._num_updates += sum("optim/grad_norm" in values for values in found)
            return metrics.mean_metrics(found, [step.packs[0].num_trained_tokens for step in steps])

    def _update_reference(self) -> None:
        interval = self._config.ref.update_interval
        if interval is not None and self.step % interval == 0:
            self._backend.update_reference()

    def _push_weights(self) -> None:
        """If the engine generates before the next optimizer step; else it stays asleep."""
        generates = self._config.algorithm.algorithm != "sft" and self.step < self._config.run.num_rollout
        if self._weight_sync is not None and (generates or self._evaluation_is_due):
            self._weight_sync.push(self.step, self._phases)
            self._asleep = False

    def _start_rollouts(self) -> None:
        """Start the rollouts that the new weights allow."""
        if self.step < self._config.run.num_rollout:
            self._source.run_ahead(self.step)

    def _finish_step(self, rollout: RolloutBatch, steps: Sequence[StepBatches], trained: Metrics) -> None:
        """Report the rollout that the last step was trained on."""
        values = self._report.sample_metrics(rollout, self.step - 1) | trained
        values |= self._report.speed_metrics(steps, self._phases, num_tokens=values["progress/tokens"])
        synced = self._weight_sync.metrics(self.step) if self._weight_sync else {}
        values |= metrics.reduce_max(synced) if synced else {}
        values |= self._report.progress_metrics(values)
        self._report.log(values, self.step)
        self._report.warn_without_signal(values, self._folder.path)
        self._call("on_step", values)

    def _require_an_update(self) -> None:
        """Raise NumericsError at the end of a run in which every optimizer step was skipped."""
        skipped = self._report.last["optim/skipped_steps"]
        if self.step == self._config.run.num_rollout and skipped and not self._num_updates:
            raise NumericsError(
                f"nothing was trained: gradients were not finite in all {skipped:.0f} optimizer steps; lower --lr or "
                "--clip-grad, compute with --no-bf16, or check --loss"
            )

    def _evaluate(self) -> None:
        if self._evaluation is None:
            return
        with self._phases("eval"):
            values, shown = self._evaluation.run()
        self._report.log(values, self.step)
        self._report.log_samples(rows_without_training(shown, self._tokenizer), "heldout", self.step)
        self._call("on_eval", values)

    def _call(self, method: str, argument: Any) -> None:
        for callback in self._trainer.callbacks:
            getattr(callback, method)(self._trainer, argument)

    @property
    def _evaluation_is_due(self) -> bool:
        """After the first and the last step, and every --eval-interval."""
        if self._evaluation is None:
            return False
        run = self._config.run
        if not run.num_rollout:  # only an evaluation, of any step
            return True
        return self.step in (0, run.num_rollout) or self.step % run.eval_interval == 0

    @property
    def _checkpoint_is_due(self) -> bool:
        run = self._config.run
        return self.step == run.num_rollout or bool(run.save_interval and self.step % run.save_interval == 0)

    def _new_advantages(self, samples: list[Sample]) -> list[Sample]:
        """Of samples whose rewards have changed."""
        with raise_on_all_ranks(RolloutError, "--advantage-estimator"):
            samples = assign_advantages(samples, self._advantages)
        return scale_over_batch(samples, self._advantages, metrics.reduce_sums)

    def _why_nothing_is_left(self, rollout: RolloutBatch) -> str:
        counts = metrics.reduce_sums({"samples": len(rollout.samples), "dropped": rollout.num_dropped})
        if counts["dropped"] and not counts["samples"]:
            return (
                f"--overlong-samples drop left nothing to train on: all {counts['dropped']:.0f} samples are longer "
                f"than "
                f"{self._config.pack_budget}; raise it"
            )
        return (
            f"--mask-truncated left nothing to train on: all {counts['samples']:.0f} responses were cut off at "
            f"--rollout-max-response-len {self._rules.max_response_len}; raise it"
        )

    def _save(self) -> None:
        """With --offload-train the engine sleeps meanwhile, and gets its weights once more afterwards."""
        with self._phases("save"):
            written = self._checkpoints.write(self.step, self._write_state)
        self._saved = self.step
        if written is not None:
            self._call("on_save", written)
        if self._config.sync.offload_train and self.step < self._config.run.num_rollout:
            self._push_weights()

    def _write_state(self, directory: Path) -> ShardWrite | None:
        shards = self._backend.save(directory, self.step)
        if dist.get_rank() == 0:
            state = {"step": self.step, "totals": self._report.totals, "stream": self._stream.state_dict()}
            state["num_updates"] = self._num_updates
            if RUN_ID in os.environ:
                state[RUN_ID] = os.environ[RUN_ID]
            (directory / PROGRESS_FILE).write_text(json.dumps(state))
        return shards

    def _resume(self) -> None:
        checkpoint, progress = self._folder.checkpoint, self._folder.progress
        if checkpoint is None or progress is None:
            return
        with raise_on_all_ranks(CheckpointError, f"--resume: checkpoint {checkpoint}"):
            if self._config.run.num_rollout:  # else the data may be other data
                self._stream.load_state_dict(progress["stream"])
            self._report.totals = {name: float(progress["totals"][name]) for name in self._report.totals}
        self.step = self._saved = self._backend.load(checkpoint)
        self._num_updates = progress.get("num_updates", 1)
