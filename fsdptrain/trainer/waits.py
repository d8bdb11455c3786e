"""What ranks do together, and where each of them stood when it took too long."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import torch.distributed as dist

from fsdptrain.config import Config
from fsdptrain.config.server_checks import SERVER_ENGINE
from fsdptrain.rollout.stacks import StackDump
from fsdptrain.trainer.run_dir import RunFolder

_LONG = 0.9  # of --dist-timeout: stacks are written before a collective gives up

Waits = Callable[[], AbstractContextManager[None]]


def watched_waits(config: Config, folder: RunFolder, stack: ExitStack) -> Waits:
    """For engines in the trainer's process. Servers have deadlines, and stacks, of their own."""
    if config.rollout.engine == SERVER_ENGINE:
        return nullcontext
    stacks = StackDump(folder.path / "stacks", dist.get_rank())
    stack.callback(stacks.close)
    return partial(stacks.around, _LONG * config.launch.dist_timeout)
