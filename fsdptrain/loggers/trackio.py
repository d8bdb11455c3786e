"""trackio logger: a local dashboard, `trackio show`.

The database is in TRACKIO_DIR, by default `trackio` beside output_dir, so that runs of one folder show up together.
"""

import contextlib
import io
import logging
import math
import os
from collections.abc import Mapping, Sequence

from fsdptrain.errors import ConfigError
from fsdptrain.loggers.run_info import RunInfo
from fsdptrain.loggers.tables import sample_table

_LOG = logging.getLogger(__name__)


class TrackioLogger:
    """Logger for trackio. Continues the trackio run of the same name on resume."""

    def __init__(self, info: RunInfo) -> None:
        os.environ.setdefault(
            "TRACKIO_DIR", str(info.output_dir.resolve().parent / "trackio")
        )  # read when trackio is imported
        try:
            import trackio
        except ImportError as error:
            raise ConfigError("--log-to trackio needs the trackio package: pip install 'fsdptrain[trackio]'") from error
        self._trackio = trackio
        with contextlib.redirect_stdout(io.StringIO()):  # replaces six lines about the dashboard by our one line
            self._run = trackio.init(
                project=info.project,
                name=info.run_name,
                config=info.config.as_dict() if info.config is not None else None,
                resume="allow" if info.resumed_step is not None else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        _LOG.info("dashboard: TRACKIO_DIR=%s trackio show --project %s", os.environ["TRACKIO_DIR"], info.project)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def log_samples(self, samples: Sequence[Mapping[str, object]], step: int) -> None:
        if samples:
            columns, rows = sample_table(samples)
            table = self._trackio.Table(columns=columns, data=rows)
            self._run.log({f"samples/{samples[0].get('set', 'all')}": table}, step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()
