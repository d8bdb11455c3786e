"""A checkpoint that is written while training goes on: the tensors are copied, and a thread writes the copies.

That is what `torch.distributed.checkpoint.async_save` does; its thread ends with the tensors, while here the reference
and the rename of the folder follow, so the thread is ours. Collectives of that thread go over a group of their own.
"""

from collections.abc import Callable
from datetime import timedelta
from threading import Thread

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from fsdptrain import platform
from fsdptrain.errors import CheckpointError


class Staging:
    """Host memory for copies, pinned where there is an accelerator, which is kept from one checkpoint to the next."""

    def __init__(self, timeout_s: float) -> None:
        """Collective."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup)  # of all ranks
        self.group = group
        self._stagers: dict[str, DefaultStager] = {}

    def copy(self, purpose: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of this rank's shards, there when this returns. Until the last copy for `purpose` is written: one at a time.

        A stager of its own for each purpose: it knows a storage again, and would put the reference, which is swapped
        into the storages of the policy, over the copy of the policy.
        """
        if purpose not in self._stagers:
            has_accelerator = platform.has_accelerator()
            options = StagingOptions(
                use_pinned_memory=has_accelerator,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=has_accelerator,
            )
            self._stagers[purpose] = DefaultStager(options)
        staged = self._stagers[purpose].stage(tensors)
        assert isinstance(staged, dict)
        return staged


class Background:
    """`work`, in a thread that does not keep the process alive."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: Exception | None = None
        self._work = work
        self._thread = Thread(target=self._run, daemon=True, name="checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - whatever it is, `check` raises it
            self._error = error

    def check(self) -> None:
        """Raises what went wrong so far."""
        if self._error is not None:
            raise self._error

    def wait(self, timeout_s: float) -> None:
        """Until it has ended. Raises what went wrong, or CheckpointError after `timeout_s`."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(
                f"--async-save: a checkpoint was not written in {timeout_s:g} s: raise --dist-timeout, or leave it out"
            )
        self.check()
