"""Metrics of each rollout: samples, training, speed and memory, to the loggers."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fsdptrain.config import Config
from fsdptrain.data.prompts import PromptStream
from fsdptrain.rollout.weight_sync.sync import WeightSync
from fsdptrain.trainer import metrics
from fsdptrain.trainer.batches import StepBatches
from fsdptrain.trainer.phases import Phases
from fsdptrain.trainer.samples.source import RolloutBatch
from fsdptrain.types import Metrics

if TYPE_CHECKING:
    from fsdptrain.protocols import Logger
    from fsdptrain.trainer.speed import Speed

log = logging.getLogger(__name__)

_TIMED = ("step", "generate", "reward", "idle", "logprobs", "train", "sync")
_MANY_ALIKE = 3  # rollouts in a row without a learning signal


class Reporter:
    """Computes the metrics of a rollout and sends them to the loggers. Methods are collective."""

    def __init__(
        self,
        config: Config,
        loggers: "Sequence[Logger]",
        *,
        stream: PromptStream,
        speed: "Speed | None",  # None: the peak of the device is not known
        planned_memory: int | None,
        folder: Path,
    ) -> None:
        self.last: Metrics = {}  # the last value of every metric
        self.totals = {"progress/samples": 0.0, "progress/tokens": 0.0}
        self._config = config
        self._loggers = loggers
        self._stream = stream
        self._speed = speed
        self._planned_memory = planned_memory
        self._folder = folder
        self._num_alike = 0  # rollouts in a row

    def step(
        self,
        rollout: RolloutBatch,
        steps: Sequence[StepBatches],
        phases: Phases,
        weight_sync: WeightSync | None,
        trained: Metrics,
        *,
        step: int,
    ) -> Metrics:
        """Log and return all metrics of the rollout that step number `step` was trained on."""
        values = self.sample_metrics(rollout, step - 1) | trained
        values |= self.speed_metrics(steps, phases, num_tokens=values["progress/tokens"])
        synced = weight_sync.metrics(step) if weight_sync else {}
        values |= metrics.reduce_max(synced) if synced else {}
        self.totals = {name: total + values[name] for name, total in self.totals.items()}
        stream = self._stream
        skipped = {"progress/too_long_prompts": stream.num_too_long, "progress/held_out_prompts": stream.num_held_out}
        values |= {**self.totals, "progress/epoch": stream.progress, **skipped}
        self.log(values, step)
        self.warn_without_signal(values)
        return values

    def sample_metrics(self, rollout: RolloutBatch, step: int) -> Metrics:
        """Of the samples to train on, when the policy has version `step`."""
        data = self._config.data
        found = metrics.sample_metrics(rollout, by_row=bool(data.reward_key or data.environment_key)) | rollout.metrics
        if self._config.sync.max_staleness:
            from fsdptrain.trainer.token_metrics import staleness_metrics

            found |= staleness_metrics(rollout.samples, step)
        if self._config.environment.has_episodes:
            from fsdptrain.trainer.token_metrics import episode_metrics

            found |= episode_metrics(rollout.samples)
        return found

    def speed_metrics(self, steps: Sequence[StepBatches], phases: Phases, *, num_tokens: float) -> Metrics:
        """Seconds of each phase on the slowest rank, tokens per second, utilization, memory."""
        names = [*_TIMED, *["offload"] * self._config.sync.offload_train]
        slowest = metrics.reduce_max({f"perf/{name}_s": phases.seconds.get(name, 0.0) for name in names})
        tokens_per_s = num_tokens / slowest["perf/step_s"]
        return {
            **metrics.packing_metrics(steps),
            **slowest,
            "perf/tokens_per_s": tokens_per_s,
            "perf/tokens_per_s_per_device": tokens_per_s / dist.get_world_size(),
            **(self._speed.utilization(steps, train_s=slowest["perf/train_s"]) if self._speed else {}),
            **metrics.memory_metrics(planned=self._planned_memory),
        }

    def log(self, values: Metrics, step: int) -> None:
        self.last |= values
        for logger in self._loggers:
            logger.log(values, step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], name: str, step: int) -> None:
        rows = [{"set": name, **row} for row in rows]
        for logger in self._loggers:
            logger.log_samples(rows, step)

    def warn_without_signal(self, values: Metrics) -> None:
        """Warn once when all rewards were equal for several rollouts."""
        learns = self._config.algorithm.advantage_estimator != "none"
        alike = learns and values.get("reward/std", 1.0) < 1e-6
        self._num_alike = self._num_alike + 1 if alike else 0
        if self._num_alike == _MANY_ALIKE:
            line = "all rewards were %g for %d rollouts: no learning signal; if this is wrong, check %s and --reward"
            log.warning(line, values["reward/mean"], _MANY_ALIKE, self._folder / "samples.jsonl")
