"""MLflow: MLFLOW_TRACKING_URI, by default a database beside output_dir. Samples are CSV files, shown as tables."""

import csv
import io
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fsdptrain.distributed import one_line
from fsdptrain.errors import ConfigError
from fsdptrain.loggers import RunInfo
from fsdptrain.loggers.dashboards import Dashboard, shared_options

_LOG = logging.getLogger(__name__)


def open_mlflow(info: RunInfo) -> Dashboard:
    """Open a run of MLflow, the same one on resume. A server that fails later costs its steps, not the run."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read on import
    import mlflow  # pyright: ignore[reportMissingImports] - an extra
    from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

    logging.getLogger("mlflow").setLevel(logging.WARNING)  # else it logs how it creates a database
    folder, path = info.output_dir.resolve().parent, info.output_dir / "mlflow_run_id"
    uri, files = mlflow.get_tracking_uri(), None
    if not mlflow.is_tracking_uri_set():
        uri, files = f"sqlite:///{folder / 'mlflow.db'}", (folder / "mlflow").as_uri()
        _LOG.info("dashboard: mlflow server --backend-store-uri %s", uri)
    try:
        client = mlflow.MlflowClient(uri)
        if info.resumed_step is None or not path.exists():
            path.write_text(_new_run(client, info, files))
        client.update_run(run_id := path.read_text(), status="RUNNING")
    except mlflow.MlflowException as error:
        other = f", or remove {path} to start another run" if path.exists() else ""
        raise ConfigError(f"--log-to mlflow: {one_line(error)}; check MLFLOW_TRACKING_URI{other}") from error

    @contextmanager
    def warning(what: str) -> Iterator[None]:
        try:
            yield
        except mlflow.MlflowException as error:
            _LOG.warning("--log-to mlflow: %s: %s", what, one_line(error))

    def write(values: Mapping[str, Any], step: int) -> None:
        now = int(time.time() * 1000)
        with warning(f"step {step} is only in files of output_dir"):
            for name, table in values.items():
                if isinstance(table, str):
                    client.log_text(run_id, table, f"{name}/{step:08}.csv")
            metrics = [
                Metric(re.sub(r"[^\w\-. :/]", "_", name), x, now, step)  # pass@4 is no name there
                for name, x in values.items()
                if not isinstance(x, str) and math.isfinite(x)
            ]
            client.log_batch(run_id, metrics)

    def finish() -> None:
        with warning("the run still counts as running"):
            client.set_terminated(run_id)

    return Dashboard(write, _csv, finish)


def _new_run(client: Any, info: RunInfo, files: str | None) -> str:
    """Create a run and return its id. files: where a new project keeps those of its runs."""
    from mlflow.entities import Param  # pyright: ignore[reportMissingImports] - an extra

    found = client.get_experiment_by_name(info.project)
    project = found.experiment_id if found else client.create_experiment(info.project, files)
    run_id = client.create_run(project, run_name=info.run_name).info.run_id
    options = [Param(name, str(value)) for name, value in shared_options(info.config).items()]
    for start in range(0, len(options), 100):  # of one request
        client.log_batch(run_id, params=options[start : start + 100])
    return run_id


def _csv(*, columns: Sequence[str], data: Sequence[Sequence[Any]]) -> str:
    lines = io.StringIO()
    csv.writer(lines).writerows([columns, *data])
    return lines.getvalue()
