"""TensorBoard: event files in output_dir/tensorboard, for `tensorboard --logdir runs`. Samples are texts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from textwrap import indent
from typing import Any

from fsdptrain.loggers import RunInfo
from fsdptrain.loggers.dashboards import Dashboard, shared_options


def open_tensorboard(info: RunInfo) -> Dashboard:
    """Open event files. TensorBoard hides earlier records of the steps that follow: on resume, those not resumed."""
    from torch.utils.tensorboard import SummaryWriter

    first = 0 if info.resumed_step is None else info.resumed_step + 1
    writer = SummaryWriter(str(info.output_dir / "tensorboard"), purge_step=first, flush_secs=10)
    options = shared_options(info.config)
    writer.add_text("options", _text(columns=options, data=[[*options.values()]]), first)

    def write(values: Mapping[str, Any], step: int) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                writer.add_text(name, value, step)
            elif math.isfinite(value):
                writer.add_scalar(name, value, step)

    return Dashboard(write, _text, writer.close)


def _text(*, columns: Iterable[str], data: Iterable[Sequence[Any]]) -> str:
    """Format rows as Markdown: each is a block of code, in which nothing is markup."""
    rows = ("\n".join(f"{name}: {value}" for name, value in zip(columns, row, strict=True)) for row in data)
    return "\n\n---\n\n".join(indent(row, "    ", lambda line: True) for row in rows)
