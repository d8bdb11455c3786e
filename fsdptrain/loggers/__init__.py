"""Metric loggers. metrics.jsonl and samples.jsonl are always written; `--log-to` adds others.

A plug-in is a callable `(RunInfo) -> Logger`: an entry point `loggers.<name>` of the group `fsdptrain.plugins`, or
`--log-to package.module:MyLogger`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from fsdptrain.config import Config, LogConfig
from fsdptrain.loggers.jsonl import JsonlLogger
from fsdptrain.registry import Table, resolve

if TYPE_CHECKING:
    from fsdptrain.protocols import Logger

__all__ = ["LOGGERS", "RunInfo", "build_loggers"]


@dataclass(frozen=True)
class RunInfo:
    """Constructor argument of all loggers, built-in and plug-ins."""

    output_dir: Path
    project: str
    run_name: str
    total_steps: int  # rollouts of the run
    resumed_step: int | None = None  # step of the checkpoint to resume from; None: new run
    config: Config | None = None


LOGGERS: "Table[Callable[[RunInfo], Logger]]" = Table(
    {
        "console": "fsdptrain.loggers.console:ConsoleLogger",
        "wandb": "fsdptrain.loggers.dashboards:open_wandb",
        "trackio": "fsdptrain.loggers.dashboards:open_trackio",
        "tensorboard": "fsdptrain.loggers.tensorboard:open_tensorboard",
        "mlflow": "fsdptrain.loggers.mlflow_client:open_mlflow",
    }
)


def build_loggers(
    log: LogConfig, output_dir: Path, *, total_steps: int, resumed_step: int | None = None, config: Config | None = None
) -> "list[Logger]":
    """Build the loggers of a run, JSONL first. Returns an empty list except on rank 0.

    Step k is logged after the k-th rollout, starting at 1; step 0 is the evaluation before training. With
    `resumed_step`, records of later steps are dropped. Raises ConfigError for an unknown logger, a missing package or
    an unwritable directory.
    """
    if (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) != 0:
        return []
    info = RunInfo(
        output_dir, log.project, log.run_name or output_dir.resolve().name, total_steps, resumed_step, config
    )
    factories = [resolve(name, LOGGERS, flag="--log-to", plugins="loggers") for name in log.to]
    return [JsonlLogger(info), *(factory(info) for factory in factories)]
