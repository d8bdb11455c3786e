"""Weights & Biases logger. `WANDB_MODE=offline` writes to output_dir/wandb for a later `wandb sync`."""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdptrain.errors import ConfigError
from fsdptrain.loggers.run_info import RunInfo
from fsdptrain.loggers.tables import sample_table


class WandbLogger:
    """Logger for wandb. Continues the same wandb run on resume."""

    def __init__(self, info: RunInfo) -> None:
        try:
            import wandb
            from wandb.errors import CommError, UsageError
        except ImportError as error:
            raise ConfigError("--log-to wandb needs the wandb package: pip install 'fsdptrain[wandb]'") from error
        self._table = wandb.Table
        try:
            self._run = wandb.init(
                project=info.project,
                name=info.run_name,
                id=_run_id(info.output_dir, fresh=info.resumed_step is None),
                resume="allow",
                dir=info.output_dir,
                config=info.config.as_dict() if info.config is not None else {},
                settings=wandb.Settings(silent=True, console="off"),
            )
        except (UsageError, CommError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(f"--log-to wandb: {reason}; set WANDB_API_KEY, or WANDB_MODE=offline") from error
        self._run.define_metric("*", step_metric="step")  # wandb's own step cannot decrease on resume

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def log_samples(self, samples: Sequence[Mapping[str, object]], step: int) -> None:
        if samples:
            columns: list[Any]  # the types of wandb are narrower
            columns, rows = sample_table(samples)
            data: list[Any] = list(rows)
            table = self._table(columns=columns, data=data, allow_mixed_types=True)  # labels may be numbers or text
            self._run.log({f"samples/{samples[0].get('set', 'all')}": table, "step": step})

    def close(self) -> None:
        self._run.finish()


def _run_id(output_dir: Path, *, fresh: bool) -> str:
    """Return the wandb id of this run, which is stored in `output_dir`."""
    path = output_dir / "wandb_run_id"
    if fresh or not path.exists():
        output_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text()
