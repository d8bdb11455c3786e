"""Information about the run for loggers."""

from dataclasses import dataclass
from pathlib import Path

from fsdptrain.config import Config


@dataclass(frozen=True)
class RunInfo:
    """Constructor argument of all loggers: console, files, wandb, trackio and plug-ins."""

    output_dir: Path
    project: str
    run_name: str
    total_steps: int  # rollouts of the run
    resumed_step: int | None = None  # step of the checkpoint to resume from; None: new run
    config: Config | None = None
