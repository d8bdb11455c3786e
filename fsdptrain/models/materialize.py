"""Real tensors in the place of meta ones: what both ways of loading share."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils import logging as transformers_logging

from fsdptrain.errors import CheckpointError
from fsdptrain.models.files import some_of


@torch.no_grad()
def filled_like(parameter: nn.Parameter, local: Tensor, device: torch.device) -> nn.Parameter:
    """A parameter like the meta `parameter`, on `device`, that holds `local`."""
    tensor = torch.empty_like(parameter, device=device)
    local_part(tensor).copy_(local)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameter_names(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of each parameter, in the order of the model; a tied one has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [tuple(group) for group in names.values()]


def register(model: nn.Module, names: Iterable[str], tensor: Tensor) -> None:
    """Make `tensor` the parameter or buffer of all `names`."""
    for name in names:
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, tensor)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no load reports: what is wrong becomes one error."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def refuse_leftovers(path: Path, missing: set[str], unexpected: set[str]) -> None:
    if missing:
        raise CheckpointError(f"--hf-checkpoint {path}: the files lack {some_of(sorted(missing))}, which the model has")
    if unexpected:
        raise CheckpointError(
            f"--hf-checkpoint {path}: the files hold {some_of(sorted(unexpected))}, which the model has not; "
            "does config.json belong to them?"
        )
