"""Trainer: the loop, and what happens around it."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdptrain import platform
from fsdptrain.algo.advantages import ADVANTAGES, whiten
from fsdptrain.config import Config, DataConfig, check_processes
from fsdptrain.data.packing import drop_overlong
from fsdptrain.errors import CheckpointError, ConfigError, DataError, RolloutError
from fsdptrain.fsdp.checkpoint import CheckpointFolder
from fsdptrain.models.collective import together
from fsdptrain.protocols import RewardFunction
from fsdptrain.rewards.scoring import check_unscored
from fsdptrain.trainer import summary
from fsdptrain.trainer.batches import PackingRules, StepBatches, make_batches
from fsdptrain.trainer.build import Parts, build_parts, loss_config
from fsdptrain.trainer.experience import Experience
from fsdptrain.trainer.folder import PROGRESS_FILE, RunFolder, open_folder
from fsdptrain.trainer.summary import Stopwatch
from fsdptrain.types import Metrics, PackedBatch


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
        with platform.process_group(self.config.launch.dist_timeout):
            local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            check_processes(self.config, world_size=dist.get_world_size(), local_world_size=local_world_size)
            platform.seed_everything(self.config.run.seed + dist.get_rank())
            platform.set_deterministic(self.config.model.deterministic_mode)
            folder = open_folder(self.config)
            with build_parts(self.config, folder, reward=self._reward, dataset=self._dataset) as parts:
                return _Run(self.config, folder, parts).go()


class _Run:
    """One call of `fit`: the parts, and what counts up."""

    def __init__(self, config: Config, folder: RunFolder, parts: Parts) -> None:
        self._config = config
        self._folder = folder
        self._parts = parts
        self._checkpoints = CheckpointFolder(folder.path, keep_last=config.run.keep_last)
        self._loss = parts.loss
        self._loss_config = loss_config(config.algorithm)
        self._rules = PackingRules(
            max_tokens=config.batch.max_tokens_per_gpu,
            aggregation=config.algorithm.loss_aggregation,
            max_response_len=config.rollout.max_response_len,
            num_steps=config.steps_per_rollout,
            layout=parts.backend.layout_probe.layout,
        )
        self._step = 0  # rollouts that were trained on; also the version of the policy
        self._totals = {"progress/samples": 0.0, "progress/tokens": 0.0}
        self._reward_names = summary.RewardNames()
        self._last: Metrics = {}

    def go(self) -> Metrics:
        """From the checkpoint, or from the start, to --num-rollout."""
        run = self._config.run
        self._resume()
        self._folder.write_config(self._config)
        self._hand_over_weights()
        if self._step == 0:
            self._evaluate()
        while self._step < run.num_rollout:
            self._rollout_and_train()
            if self._evaluation_is_due:
                self._evaluate()
            if self._step == run.num_rollout or (run.save_interval and self._step % run.save_interval == 0):
                self._checkpoints.write(self._step, self._save)
        if run.export:
            self._parts.backend.export(self._folder.path / "hf")
        return self._last

    def _rollout_and_train(self) -> None:
        """One rollout: collect, pack, score, train, hand over the weights, report."""
        watch = Stopwatch()
        with watch("step"):
            experience = self._collect(watch)
            metrics = summary.sample_metrics(experience, self._reward_names)
            if experience.scores is not None:
                check_unscored(experience.scores, max_unscored_fraction=self._config.reward.max_unscored_fraction)
            steps = make_batches(experience.samples, self._rules)
            if not steps:
                raise DataError(
                    f"--overlong drop left nothing to train on: all {metrics['progress/dropped']:.0f} samples are "
                    f"longer than --max-tokens-per-gpu {self._rules.max_tokens}; raise it"
                )
            with watch("score"):
                steps = self._score(steps)
            with watch("train"):
                trained = [self._parts.backend.train_step(s.packs, self._loss, self._loss_config) for s in steps]
            self._step += 1
            with watch("sync"):
                self._hand_over_weights()
        metrics |= summary.mean_metrics(trained)
        metrics |= summary.packing_metrics(steps)
        metrics |= self._performance(steps, watch, num_tokens=metrics["progress/tokens"])
        metrics |= self._advance(metrics)
        self._report(metrics)
        self._log_samples(experience.shown, "train")

    def _collect(self, watch: Stopwatch) -> Experience:
        batch = self._config.batch
        with watch("collect"):
            experience = self._parts.source.collect(self._step)
            with together(RolloutError, "rollout"):
                kept, dropped = drop_overlong(
                    experience.samples, max_tokens=batch.max_tokens_per_gpu, overlong=batch.overlong
                )
                if self._parts.engine is not None:
                    self._parts.engine.sleep()
        watch.seconds["generate"] = experience.generate_s
        watch.seconds["reward"] = experience.reward_s
        watch.seconds["idle"] = max(0.0, watch.seconds["collect"] - experience.generate_s - experience.reward_s)
        if experience.scores is not None and ADVANTAGES[self._config.algorithm.advantage_estimator].whitened:
            kept = whiten(kept, summary.reduce_sums)  # after `together`: it is collective
        return replace(experience, samples=kept, num_dropped=dropped)

    def _score(self, steps: list[StepBatches]) -> list[StepBatches]:
        """Add old and reference log-probabilities where the loss asks for them, before the first update."""
        algorithm = self._config.algorithm
        packs = [pack for step in steps for pack in step.packs]
        if algorithm.algorithm == "sft":
            return steps
        if algorithm.use_rollout_logprobs:
            packs = [replace(pack, old_logprobs=pack.rollout_logprobs) for pack in packs]
        elif self._config.needs_old_logprobs:
            scores = self._parts.backend.score(packs, "policy")
            packs = _with(packs, "old_logprobs", scores)
            if self._config.router.replay == "scoring":
                packs = [replace(pack, routes=score.routes) for pack, score in zip(packs, scores, strict=True)]
        if algorithm.kl_loss_coef > 0:
            packs = _with(packs, "ref_logprobs", self._parts.backend.score(packs, "reference"))
        remaining = iter(packs)
        return [replace(step, packs=[next(remaining) for _ in step.packs]) for step in steps]

    def _hand_over_weights(self) -> None:
        """Where the engine will generate before the next optimizer step; else it stays asleep."""
        engine = self._parts.engine
        generates = self._config.algorithm.algorithm != "sft" and self._step < self._config.run.num_rollout
        if engine is not None and (generates or self._evaluation_is_due):
            engine.wake_up()
            engine.update_weights(self._parts.backend.hf_weights(engine.weight_naming), self._step)

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
        metrics, shown = self._parts.evaluation.run()
        self._report(metrics)
        self._log_samples(shown, "heldout")

    def _performance(self, steps: Sequence[StepBatches], watch: Stopwatch, *, num_tokens: float) -> Metrics:
        names = ("step", "generate", "reward", "idle", "score", "train", "sync")
        slowest = summary.reduce_max({f"perf/{name}_s": watch.seconds.get(name, 0.0) for name in names})
        world_size = dist.get_world_size()
        tokens_per_s = num_tokens / slowest["perf/step_s"]
        return {
            **slowest,
            "perf/tokens_per_s": tokens_per_s,
            "perf/tokens_per_s_per_device": tokens_per_s / world_size,
            **self._parts.speed.utilisation(steps, train_s=slowest["perf/train_s"]),
            **summary.memory_metrics(),
        }

    def _advance(self, metrics: Metrics) -> Metrics:
        self._totals = {name: total + metrics[name] for name, total in self._totals.items()}
        return {**self._totals, "progress/epoch": self._parts.stream.progress}

    def _report(self, metrics: Metrics) -> None:
        self._last |= metrics
        for logger in self._parts.loggers:
            logger.log(metrics, self._step)

    def _log_samples(self, shown: Sequence[Mapping[str, Any]], name: str) -> None:
        rows = [{"set": name, **row} for row in shown]
        for logger in self._parts.loggers:
            logger.log_samples(rows, self._step)

    def _save(self, directory: Path) -> None:
        self._parts.backend.save(directory, self._step)
        if dist.get_rank() == 0:
            state = {"step": self._step, "totals": self._totals, "stream": self._parts.stream.state_dict()}
            (directory / PROGRESS_FILE).write_text(json.dumps(state))

    def _resume(self) -> None:
        checkpoint, progress = self._folder.checkpoint, self._folder.progress
        if checkpoint is None or progress is None:
            return
        with together(CheckpointError, f"--resume: checkpoint {checkpoint}"):
            self._parts.stream.load_state_dict(progress["stream"])
        self._step = self._parts.backend.load(checkpoint)
        self._totals = progress["totals"]


def _with_own_data(config: Config) -> Config:
    """Data from Python are no reasoning-gym task: its scorer and its system prompt are not theirs."""
    if config.data.prompt_data != DataConfig().prompt_data:
        raise ConfigError(
            f"--prompt-data {config.data.prompt_data} and Trainer(dataset=...) are both given: choose one"
        )
    return config.model_copy(update={"data": config.data.model_copy(update={"prompt_data": "dataset"})})


def _with(packs: Sequence[PackedBatch], field: str, scores: Sequence[Any]) -> list[PackedBatch]:
    return [replace(pack, **{field: score.values}) for pack, score in zip(packs, scores, strict=True)]
