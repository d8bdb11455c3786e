"""Compute in float64 whatever a model casts to: laws are then exact up to 1e-12, on any CPU."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.fsdp import build as loading
from fsdptrain.model.sizes import expert_choice
from fsdptrain.rollout.embedded import engine as embedded


class Exact(TorchFunctionMode):
    """Replace float32 by float64 in every call of torch but a view of the same bytes, and as the default."""

    def __enter__(self):
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error):
        torch.set_default_dtype(torch.float32)
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.view:
            return func(*args, **(kwargs or {}))
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """Convert `model`. Compute under `Exact`."""
    if expert_choice(model.config):
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    return model.double()


def backends_in_float64() -> None:
    """Let backends and embedded engines of this process hold weights, moments and activations in float64.

    Compute under `Exact`.
    """
    build, replica = loading.build_meta_model, embedded.build_replica

    def build_meta_model(*args: Any, **kwargs: Any) -> PreTrainedModel:
        return in_float64(build(*args, **kwargs))

    def build_replica(*args: Any, **kwargs: Any) -> PreTrainedModel:
        return in_float64(replica(*args, **kwargs))

    loading.build_meta_model = build_meta_model
    embedded.build_replica = build_replica
    Config.compute_dtype_name = property(lambda self: "float64")  # type: ignore[method-assign]
