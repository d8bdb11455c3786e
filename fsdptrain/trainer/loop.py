"""Trainer: the loop, and what happens around it."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdptrain import platform
from fsdptrain.algo.advantages import assign_advantages, scale_over_batch
from fsdptrain.algo.shaping import without_truncated
from fsdptrain.config import Config, DataConfig, check_own_launch, check_processes
from fsdptrain.config.grid import across_nodes
from fsdptrain.data.packing.pack import drop_overlong
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import CheckpointError, ConfigError, DataError, RolloutError
from fsdptrain.fsdp.checkpoint import CheckpointFolder
from fsdptrain.protocols import OffloadingBackend, RewardFunction, TimelineLogger
from fsdptrain.trainer import metrics as summary
from fsdptrain.trainer.batches import PackingRules, StepBatches, make_batches
from fsdptrain.trainer.components import Components, build_components, loss_config
from fsdptrain.trainer.epochs import carry_scores
from fsdptrain.trainer.kl import KlControl, kl_in_reward
from fsdptrain.trainer.logprobs import Scorer
from fsdptrain.trainer.run_dir import LAUNCH, PROGRESS_FILE, RunFolder, open_folder
from fsdptrain.trainer.samples.single_turn import RolloutBatch
from fsdptrain.trainer.timeline import WORKERS, Stopwatch
from fsdptrain.types import Metrics, Sample

log = logging.getLogger(__name__)


class Trainer:
    """A run: `Trainer(config).fit()`.

    Args:
        config: every option; see fsdptrain.config.
        reward: a function in place of `--reward`: (prompt, response text) -> float or {name: float}.
        dataset: rows in place of `--prompt-data`: a `datasets.Dataset` or a list of mappings.

    Under torchrun every rank makes one, with the same arguments; alone it is a run of one process.
    """

    def __init__(
        self,
        config: Config,
        *,
        reward: RewardFunction | None = None,
        dataset: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.config = config if dataset is None else _with_own_data(config)
        self._reward = reward
        self._dataset = dataset

    def fit(self) -> Metrics:
        """Train from the start, or from the newest checkpoint, to the end. Returns the last value of every metric."""
        if not dist.is_initialized():  # by `fsdptrain.launch`, which knows
            check_own_launch(self.config)
        with platform.process_group(self.config.launch.dist_timeout):
            local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            check_processes(self.config, world_size=dist.get_world_size(), local_world_size=local_world_size)
            for line in across_nodes(self.config, local_world_size) if dist.get_rank() == 0 else ():
                log.warning("%s", line)
            platform.seed_everything(self.config.run.seed + dist.get_rank())
            platform.set_deterministic(self.config.model.deterministic_mode)
            folder = open_folder(self.config)
            with build_components(self.config, folder, reward=self._reward, dataset=self._dataset) as parts:
                return _Run(self.config, folder, parts).go()


class _Run:
    """One call of `fit`: the parts, and what counts up."""

    def __init__(self, config: Config, folder: RunFolder, parts: Components) -> None:
        self._config = config
        self._folder = folder
        self._parts = parts
        self._timeline = parts.timeline
        self._checkpoints = CheckpointFolder(
            folder.path, keep_last=config.run.keep_last, timeout_s=config.launch.dist_timeout
        )
        self._loss = parts.loss
        self._loss_config = loss_config(config.algorithm)
        self._scorer = Scorer(config, parts.backend)
        self._kl = KlControl(config)
        probe = parts.backend.layout_probe
        self._rules = PackingRules.of(config, layout=probe.layout, shares_prefixes=parts.backend.shares_prefixes)
        self._step = 0  # rollouts that were trained on; also the version of the policy
        self._totals = {"progress/samples": 0.0, "progress/tokens": 0.0}
        self._reward_names = summary.RewardNames()
        self._num_alike = 0  # rollouts in a row
        self._last: Metrics = {}

    def go(self) -> Metrics:
        """From the checkpoint, or from the start, to --num-rollout."""
        run = self._config.run
        self._resume()
        self._folder.write_config(self._config)
        self._sync_weights(Stopwatch(self._timeline, self._step))
        self._run_ahead()
        if self._step == 0:
            self._evaluate()
        with self._checkpoints:
            while self._step < run.num_rollout:
                self._rollout_and_train()
                self._checkpoints.check()
                if self._evaluation_is_due:
                    self._evaluate()
                if self._step == run.num_rollout or (run.save_interval and self._step % run.save_interval == 0):
                    self._write_checkpoint()
                self._log_timeline()
            if run.export:
                with self._timeline.stage("save", self._step):
                    self._parts.backend.export(self._folder.path / "hf")
        self._log_timeline()
        return self._last

    def _run_ahead(self) -> None:
        """What may be generated with the weights that were just handed over is asked before anything else is done."""
        if self._step < self._config.run.num_rollout:
            self._parts.source.run_ahead(self._step)

    def _rollout_and_train(self) -> None:
        """One rollout: collect, pack, score, train, hand over the weights, report."""
        watch, begin = Stopwatch(self._timeline, self._step + 1), self._timeline.now()
        with watch("step"):
            experience = self._collect(watch)
            self._bring_back(watch)
            metrics = (
                summary.sample_metrics(experience, self._reward_names, self._parts.advantages) | experience.metrics
            )
            if self._config.sync.max_staleness:
                metrics |= summary.staleness_metrics(experience.samples, self._step)
            if self._config.environment.environment is not None:
                metrics |= summary.episode_metrics(experience.samples)
            samples = experience.samples
            if self._config.shaping.mask_truncated:
                samples = without_truncated(samples)
            steps = make_batches(samples, self._rules, rollout=self._step, images=experience.images)
            if not steps:
                raise DataError(self._why_nothing_is_left(metrics))
            with watch("score"):
                first, kl_metrics = self._score(steps[: self._rules.steps_per_epoch], experience.samples)
                later = steps[self._rules.steps_per_epoch :]
                recorded = self._config.router.replay == "scoring"
                steps = [*first, *carry_scores(first, later, with_routes=recorded)]
            with watch("train"):
                loss = replace(self._loss_config, kl_loss_coef=self._kl.loss_coef)
                trained = [self._parts.backend.train_step(s.packs, self._loss, loss) for s in steps]
            self._step += 1
            self._update_reference()
            self._sync_weights(watch)
            self._run_ahead()
        metrics |= kl_metrics | summary.mean_metrics(trained)
        metrics |= self._kl.adapt(metrics)
        metrics |= summary.packing_metrics(steps)
        metrics |= self._performance(steps, watch, num_tokens=metrics["progress/tokens"])
        metrics |= self._idle(begin, watch.seconds["step"])
        metrics |= self._sync_metrics()
        metrics |= self._advance(metrics)
        self._report(metrics)
        self._log_samples(experience.shown, "train")
        self._warn_of_rewards_alike(metrics)

    def _warn_of_rewards_alike(self, metrics: Metrics) -> None:
        alike = metrics.get("reward/std", 1.0) < 1e-6
        self._num_alike = self._num_alike + 1 if alike else 0
        if self._num_alike == 3:
            line = "3 rollouts in a row, every reward was %g: nothing is learnt from that; see %s, and --reward"
            log.warning(line, metrics["reward/mean"], self._folder.path / "samples.jsonl")

    def _why_nothing_is_left(self, metrics: Metrics) -> str:
        dropped = metrics["progress/dropped"]
        if dropped and not metrics["progress/samples"]:
            return (
                f"--overlong drop left nothing to train on: all {dropped:.0f} samples are "
                f"longer than {self._config.pack_budget}; raise it"
            )
        return (
            f"--mask-truncated left nothing to train on: all {metrics['progress/samples']:.0f} responses were cut off "
            f"at --rollout-max-response-len {self._rules.max_response_len}; raise it"
        )

    def _collect(self, watch: Stopwatch) -> RolloutBatch:
        batch, source, begin = self._config.batch, self._parts.source, self._timeline.now()
        if self._config.algorithm.algorithm != "sft":
            self._make_room(watch)
        with watch("collect"), self._parts.waits():
            experience = source.collect(self._step)
            with raise_on_all_ranks(RolloutError, "rollout"):
                kept, dropped = drop_overlong(
                    experience.samples, max_tokens=self._rules.max_tokens, overlong=batch.overlong
                )
                if self._parts.engine is not None:
                    self._parts.engine.sleep()
        watch.seconds |= experience.seconds
        made_here = () if source.in_flight else ("generate", "reward")
        busy = self._timeline.busy(made_here, begin, self._timeline.now())
        watch.seconds["idle"] = max(0.0, watch.seconds["collect"] - busy)
        if experience.scores is not None:  # after `raise_on_all_ranks`: it is collective
            kept = scale_over_batch(kept, self._parts.advantages, summary.reduce_sums)
        return replace(experience, samples=kept, num_dropped=dropped)

    def _advantages(self, samples: list[Sample]) -> list[Sample]:
        """Once more, for rewards that have changed. Collective."""
        with raise_on_all_ranks(RolloutError, "--advantage-estimator"):
            samples = assign_advantages(samples, self._parts.advantages)
        return scale_over_batch(samples, self._parts.advantages, summary.reduce_sums)

    def _score(self, steps: list[StepBatches], samples: Sequence[Sample]) -> tuple[list[StepBatches], Metrics]:
        """Old and reference log-probabilities, and what follows from them for the rewards, before the first update."""
        steps = self._scorer.score(steps)
        if not self._config.algorithm.kl_reward_coef:
            return steps, {}
        steps, metrics = kl_in_reward(
            samples,
            steps,
            coef=self._kl.reward_coef,
            estimator=self._config.algorithm.kl_reward_type,
            advantages=self._advantages,
        )
        return self._scorer.for_loss(steps), metrics

    def _update_reference(self) -> None:
        interval = self._config.ref.update_interval
        if interval is not None and self._step % interval == 0:
            self._parts.backend.update_reference()

    def _sync_weights(self, watch: Stopwatch) -> None:
        """Where the engine will generate before the next optimizer step; else it stays asleep."""
        weight_sync = self._parts.weight_sync
        generates = self._config.algorithm.algorithm != "sft" and self._step < self._config.run.num_rollout
        if weight_sync is None or not (generates or self._evaluation_is_due):
            return
        if self._config.sync.offload_train:
            with watch("offload"):
                self._offloading.offload(keep_weights=True)

        @contextmanager
        def span(stage: str) -> Iterator[None]:
            with watch(stage), self._parts.waits():
                yield

        weight_sync.push(self._step, span)
        watch.seconds["sync"] += watch.seconds.get("check", 0.0)

    @property
    def _evaluation_is_due(self) -> bool:
        """After this step: the first and the last one, and every --eval-interval."""
        if self._parts.evaluation is None:
            return False
        run = self._config.run
        return self._step in (0, run.num_rollout) or self._step % run.eval_interval == 0

    def _evaluate(self) -> None:
        if self._parts.evaluation is None:
            return
        self._make_room(Stopwatch())
        with self._timeline.stage("eval", self._step), self._parts.waits():
            metrics, shown = self._parts.evaluation.run()
        self._report(metrics)
        self._log_samples(shown, "heldout")

    def _performance(self, steps: Sequence[StepBatches], watch: Stopwatch, *, num_tokens: float) -> Metrics:
        names = ["step", "generate", "reward", "idle", "score", "train", "sync"]
        names += ["offload"] * self._config.sync.offload_train
        slowest = summary.reduce_max({f"perf/{name}_s": watch.seconds.get(name, 0.0) for name in names})
        world_size = dist.get_world_size()
        tokens_per_s = num_tokens / slowest["perf/step_s"]
        return {
            **slowest,
            "perf/tokens_per_s": tokens_per_s,
            "perf/tokens_per_s_per_device": tokens_per_s / world_size,
            **self._parts.speed.utilisation(steps, train_s=slowest["perf/train_s"]),
            **summary.memory_metrics(planned=self._parts.planned_memory),
        }

    def _idle(self, begin: float, seconds: float) -> Metrics:
        """Of this step the time in which nothing was generated, scored by rewards, trained, or handed over. [s]"""
        return summary.reduce_max(
            {
                f"perf/{name}_idle_s": max(0.0, seconds - self._timeline.busy(stages, begin, begin + seconds))
                for name, stages in WORKERS.items()
            }
        )

    def _log_timeline(self) -> None:
        rows = [span.as_row() for span in self._timeline.take()]
        for logger in self._parts.loggers:
            if isinstance(logger, TimelineLogger):
                logger.log_timeline(rows, self._step)

    def _sync_metrics(self) -> Metrics:
        found = self._parts.weight_sync.metrics(self._step) if self._parts.weight_sync else {}
        return summary.reduce_max(found) if found else {}

    def _advance(self, metrics: Metrics) -> Metrics:
        self._totals = {name: total + metrics[name] for name, total in self._totals.items()}
        stream = self._parts.stream
        return {**self._totals, "progress/epoch": stream.progress, "progress/too_long_prompts": stream.num_too_long}

    def _report(self, metrics: Metrics) -> None:
        self._last |= metrics
        for logger in self._parts.loggers:
            logger.log(metrics, self._step)

    def _log_samples(self, shown: Sequence[Mapping[str, Any]], name: str) -> None:
        rows = [{"set": name, **row} for row in shown]
        for logger in self._parts.loggers:
            logger.log_samples(rows, self._step)

    @property
    def _offloading(self) -> OffloadingBackend:
        backend = self._parts.backend
        assert isinstance(backend, OffloadingBackend), "checks.py refuses others"
        return backend

    def _make_room(self, watch: Stopwatch) -> None:
        """--offload-train: nothing of the trainer is on the device while completions are made."""
        if self._config.sync.offload_train:
            with watch("offload"):
                self._offloading.offload()

    def _bring_back(self, watch: Stopwatch) -> None:
        """When the engine sleeps."""
        if self._config.sync.offload_train:
            with watch("offload"):
                self._offloading.onload()

    def _write_checkpoint(self) -> None:
        """With --offload-train the engine sleeps meanwhile, and is then given its weights once more."""
        engine, away = self._parts.engine, self._config.sync.offload_train
        if engine is not None and away:
            engine.sleep()
        self._bring_back(Stopwatch())
        with self._timeline.stage("save", self._step):
            self._checkpoints.write(self._step, self._save)
        if away and self._step < self._config.run.num_rollout:
            self._sync_weights(Stopwatch(self._timeline, self._step))

    def _save(self, directory: Path) -> Callable[[], None] | None:
        rest = self._parts.backend.save(directory, self._step)
        if dist.get_rank() == 0:
            state = {"step": self._step, "totals": self._totals, "stream": self._parts.stream.state_dict()}
            state["kl_scale"] = self._kl.scale
            if LAUNCH in os.environ:
                state["launch"] = os.environ[LAUNCH]
            (directory / PROGRESS_FILE).write_text(json.dumps(state))
        return rest

    def _resume(self) -> None:
        checkpoint, progress = self._folder.checkpoint, self._folder.progress
        if checkpoint is None or progress is None:
            return
        with raise_on_all_ranks(CheckpointError, f"--resume: checkpoint {checkpoint}"):
            self._parts.stream.load_state_dict(progress["stream"])
        self._step = self._parts.backend.load(checkpoint)
        self._totals = progress["totals"]
        self._kl.scale = progress.get("kl_scale", 1.0)  # older checkpoints have none


def _with_own_data(config: Config) -> Config:
    """Data from Python are no reasoning-gym task: its scorer and its system prompt are not theirs."""
    if config.data.prompt_data != DataConfig().prompt_data:
        raise ConfigError(
            f"--prompt-data {config.data.prompt_data} and Trainer(dataset=...) are both given: choose one"
        )
    return config.model_copy(update={"data": config.data.model_copy(update={"prompt_data": "dataset"})})
