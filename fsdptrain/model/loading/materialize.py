"""Replace meta tensors with real ones. Shared by both loading strategies."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils import logging as transformers_logging

from fsdptrain.errors import CheckpointError
from fsdptrain.model.loading.files import some_of


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def store_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters of a meta model to `dtype`. Buffers, such as rotary tables, keep theirs."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype, *, copy: bool = False) -> Tensor:
    """Return `tensor` in `dtype` on `device` with the same sharding.

    Each rank moves its local part. Copies only if needed.
    """
    tensor = tensor.detach()
    part = local_part(tensor).to(device, dtype, non_blocking=True, copy=copy)
    if not isinstance(tensor, DTensor):
        return part
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def register(model: nn.Module, names: Iterable[str], tensor: Tensor) -> None:
    """Set `tensor` as the parameter or buffer of all `names`."""
    for name in names:
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, tensor)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the progress bars, load reports and warnings of the loader. It raises one error instead."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of torch, where transformers fills a weight that is missing
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def refuse_misfits(path: Path, mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    if names := sorted(name for name, _, _ in mismatched):
        raise CheckpointError(f"--hf-checkpoint {path}: {some_of(names)} of another shape than config.json says")


def refuse_leftovers(path: Path, missing: set[str], unexpected: set[str]) -> None:
    if missing:
        raise CheckpointError(f"--hf-checkpoint {path}: the files lack {some_of(sorted(missing))}, which the model has")
    if unexpected:
        raise CheckpointError(
            f"--hf-checkpoint {path}: the files hold {some_of(sorted(unexpected))}, which the model has not; "
            "does config.json belong to them?"
        )
