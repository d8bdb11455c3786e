"""Stack dumps for ranks that wait too long in a collective phase."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import torch.distributed as dist

from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.rollout.stacks import StackDump
from fsdptrain.trainer.run_dir import RunFolder

_LONG = 0.9  # fraction of --dist-timeout: dump stacks before a collective times out

Waits = Callable[[], AbstractContextManager[None]]


def watched_waits(config: Config, folder: RunFolder, stack: ExitStack) -> Waits:
    """Return the context manager that dumps stacks when an engine in the trainer's process takes too long.

    Server engines have their own deadlines and stack dumps, so it does nothing for them.
    """
    if config.engine_has_own_devices:
        return nullcontext
    with raise_on_all_ranks(ConfigError, f"--output-dir {folder.path} cannot be written: choose another"):
        stacks = StackDump(folder.path / "stacks", dist.get_rank())
    stack.callback(stacks.close)
    return partial(stacks.around, _LONG * config.launch.dist_timeout)
