"""The state of an optimizer: its tensors by name, to save, load or move, and all else."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fsdptrain.config.presets import is_custom
from fsdptrain.errors import CheckpointError, ConfigError
from fsdptrain.fsdp.optimizer import Optimizer


def state_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the state of the optimizer by parameter name, to save or load in place.

    Moments are DTensors; scalars, such as step counts, are views of shape [1].
    """
    found: dict[str, Tensor] = {}
    for p, name in optimizer.names.items():
        for key, value in optimizer.inner.state.get(p, {}).items():
            if not isinstance(value, Tensor):
                kind = f"{type(value).__name__} {key!r}"
                raise ConfigError(f"--optimizer {optimizer.config.optimizer} keeps a {kind} as state: make it a tensor")
            found[f"{name}.{key}"] = value if value.ndim else value.view(1)
    return found


def create_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Create the state that a checkpoint is loaded into, if the optimizer would create it in its first step.

    saved: what `state_dict` returned. Runs a step with learning rate 0 and gradients 0 of the parameters that had
    state, whose results are replaced by those of the checkpoint. Raises CheckpointError if the checkpoint lacks
    state.
    """
    if is_custom(optimizer.config.optimizer) and not optimizer.inner.state and saved["tensors"]:
        had_state = {key[:end] for key in saved["tensors"] for end, letter in enumerate(key) if letter == "."}
        for p, name in optimizer.names.items():
            if name in had_state:
                p.grad = torch.zeros_like(p)
        optimizer.set_lr(0.0)
        optimizer.inner.step()
        optimizer.zero_grad()
    if missing := sorted(state_tensors(optimizer).keys() - set(saved["tensors"])):
        raise CheckpointError(
            f"the checkpoint has no {missing[0]}: the state of --optimizer {optimizer.config.optimizer} has another "
            "form on this number of ranks; resume on as many ranks as before"
        )


def state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """Return all state that is not a tensor. JSON-serializable."""
    return {
        "num_updates": optimizer.num_updates,
        "num_skipped": optimizer.num_skipped,
        "num_failed": optimizer.num_failed,
        "scaler": optimizer.scaler.state_dict(),
        "tensors": list(state_tensors(optimizer)),
    }


def load_state_dict(optimizer: Optimizer, state: dict[str, Any]) -> None:
    optimizer.num_updates = state["num_updates"]
    optimizer.num_skipped = state["num_skipped"]
    optimizer.num_failed = state["num_failed"]
    if optimizer.scaler.is_enabled() and state["scaler"]:
        optimizer.scaler.load_state_dict(state["scaler"])
