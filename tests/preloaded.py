"""Prepare the fork server of the tests before it forks ranks and commands: import modules and train one step.

Ranks and commands inherit the imported modules, the compiled patterns of transformers and the caches of torch.
This saves 0.3 s of CPU time in each of some thousand processes.
"""

import gc
import tempfile
import traceback
from pathlib import Path

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch
import torch.distributed as dist

import fsdptrain.cli
import fsdptrain.launch.ranks
import fsdptrain.rollout.embedded.engine  # noqa: F401
from fsdptrain.algo.losses import LOSSES
from fsdptrain.config import resolve
from fsdptrain.fsdp.backend import FSDPBackend
from tests import families, zoo  # noqa: F401
from tests.distributed.test_fsdp_backend import GRPO, config, packs_of_this_rank, samples, scored
from tests.e2e import command, rewards  # noqa: F401
from tests.testing import save_tiny_checkpoint


def _train_once() -> None:
    """Train on one rank, then destroy its process group, which ends its threads."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_tiny_checkpoint(Path(folder) / "model")
        dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{folder}/store")
        backend = FSDPBackend(config(str(checkpoint), kl_loss_coef=0.1), total_steps=1)
        packs = scored(backend, packs_of_this_rank(samples(), 128), reference=True)
        backend.train_step(packs, LOSSES["grpo"], GRPO)
        del backend
        dist.destroy_process_group()
        gc.collect()  # cycles keep the model, whose weights tests of memory would count in forked ranks
        resolve(["--hf-checkpoint", str(checkpoint), *command.TINY_RUN])


if torch.accelerator.current_accelerator() is None:  # torch of an accelerator could not use it in forked processes then
    try:
        _train_once()
    except Exception:  # noqa: BLE001  # if the server dies, every test hangs; the tests report the error
        traceback.print_exc()
