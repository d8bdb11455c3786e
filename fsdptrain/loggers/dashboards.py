"""Weights & Biases and trackio, with samples as tables.

`WANDB_MODE=offline` writes to output_dir/wandb for a later `wandb sync`. trackio is local: `trackio show`. Its database
is in TRACKIO_DIR, by default `trackio` beside output_dir, so that runs of one folder show up together.
"""

import contextlib
import io
import logging
import math
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from fsdptrain.config import Config
from fsdptrain.config.keys import Key, all_keys
from fsdptrain.errors import ConfigError
from fsdptrain.loggers import RunInfo

_LOG = logging.getLogger(__name__)
_ON_THE_HUB = {"hf_checkpoint", "prompt_data"}
_BUILT_IN = {"loss", "advantage_estimator", "optimizer", "rollout_engine"}
_LOCAL = ("tokens", "rollout_logprobs", "error")  # only for samples.jsonl


def shared_options(config: Config | None) -> dict[str, Any]:
    """Return the options that leave the machine: those that cannot hold a secret or a path.

    These are numbers, switches, choices, names of what is built in, and names on the Hub of model and data.
    """
    options = {key.flat: (key, key.value(config)) for key in all_keys().values()} if config is not None else {}
    return {name: value for name, (key, value) in options.items() if _is_shared(key, value)}


def _is_shared(key: Key, value: Any) -> bool:
    if key.flat in _ON_THE_HUB:
        return re.fullmatch(r"[\w.-]+/[\w.-]+", value) is not None and not os.path.exists(value)
    return _is_closed(key.field.annotation) or (key.flat in _BUILT_IN and value.isidentifier())


def _is_closed(annotation: Any) -> bool:
    """Return whether a type has no text but choices."""
    if get_origin(annotation) is Literal:
        return True
    parts = get_args(annotation)
    return all(map(_is_closed, parts)) if parts else annotation in (bool, int, float, type(None))


@dataclass(frozen=True)
class Dashboard:
    """A run of one of the packages."""

    _write: Callable[[Mapping[str, Any], int], None]  # of (values, step)
    _table: Callable[..., Any]  # of `columns` and `data`
    _finish: Callable[[], None]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._write(metrics, step)

    def log_samples(self, samples: Sequence[Mapping[str, object]], step: int) -> None:
        names = dict.fromkeys(name for sample in samples for name in sample)
        columns = [name for name in names if name not in _LOCAL]
        for name in dict.fromkeys(sample.get("set", "all") for sample in samples):
            rows = [[_cell(s.get(c)) for c in columns] for s in samples if s.get("set", "all") == name]
            self._write({f"samples/{name}": self._table(columns=columns, data=rows)}, step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._finish()


def open_wandb(info: RunInfo) -> Dashboard:
    """Open a run of wandb, the same one on resume."""
    import wandb
    from wandb.errors import CommError, UsageError

    try:
        run = wandb.init(
            project=info.project,
            name=info.run_name,
            id=_run_id(info.output_dir, fresh=info.resumed_step is None),
            resume="allow",
            dir=info.output_dir,
            config=shared_options(info.config),
            settings=wandb.Settings(
                silent=True,
                console="off",
                host="",
                x_disable_meta=True,
                x_save_requirements=False,
                disable_git=True,
                save_code=False,
            ),
        )
    except (UsageError, CommError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"--log-to wandb: {reason}; set WANDB_API_KEY, or WANDB_MODE=offline") from error
    run.define_metric("*", step_metric="step")  # wandb's own step cannot decrease on resume
    table = partial(wandb.Table, allow_mixed_types=True)  # labels may be numbers or text
    return Dashboard(lambda values, step: run.log({**values, "step": step}), table, run.finish)


def _run_id(output_dir: Path, *, fresh: bool) -> str:
    """Return the wandb id of this run, which is stored in `output_dir`."""
    path = output_dir / "wandb_run_id"
    if fresh or not path.exists():
        output_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text()


def open_trackio(info: RunInfo) -> Dashboard:
    """Open a run of trackio, that of the same name on resume."""
    folder = os.environ.setdefault("TRACKIO_DIR", str(info.output_dir.resolve().parent / "trackio"))  # read on import
    import trackio

    with contextlib.redirect_stdout(io.StringIO()):  # replaces six lines about the dashboard by our one line
        run = trackio.init(
            project=info.project,
            name=info.run_name,
            config=shared_options(info.config),
            resume="allow" if info.resumed_step is not None else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
    _LOG.info("dashboard: TRACKIO_DIR=%s trackio show --project %s", folder, info.project)

    def write(values: Mapping[str, Any], step: int) -> None:
        run.log({name: x for name, x in values.items() if not isinstance(x, float) or math.isfinite(x)}, step=step)

    return Dashboard(write, trackio.Table, trackio.finish)


def _cell(value: Any) -> Any:
    """Return a number as it is, and any other value as text, because a column has one type."""
    if value is None or isinstance(value, int | float):
        return value
    return str(value).encode("utf-8", "replace").decode()  # half a surrogate pair is no UTF-8
