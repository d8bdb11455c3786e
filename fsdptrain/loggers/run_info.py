"""What a logger is told of the run that it will log."""

from dataclasses import dataclass
from pathlib import Path

from fsdptrain.config import Config


@dataclass(frozen=True)
class RunInfo:
    """A logger is made from this: the console, the files, wandb, trackio, or a plug-in's."""

    output_dir: Path
    project: str
    run_name: str
    total_steps: int  # rollouts of the whole run
    resumed_step: int | None = None  # step of the checkpoint that the run goes on from; None: it begins
    config: Config | None = None
