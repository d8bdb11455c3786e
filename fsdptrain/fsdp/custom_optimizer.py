"""An optimizer of the user: called, and checked."""

from collections.abc import Mapping

import torch
from torch import nn

from fsdptrain.config import OptimConfig
from fsdptrain.errors import ConfigError, FsdptrainError, describe
from fsdptrain.fsdp.optimizers import Build, Groups


def build_optimizer(
    build: Build, groups: Groups, options: OptimConfig, trained: Mapping[nn.Parameter, str]
) -> torch.optim.Optimizer:
    """Call the function of --optimizer. Raises ConfigError unless the result updates all `trained` parameters."""
    flag = f"--optimizer {options.optimizer}"
    try:
        found = build(groups, options)
    except FsdptrainError:
        raise
    except Exception as error:  # user code may raise anything
        raise ConfigError(f"{flag} raises {describe(error)}") from error
    if not isinstance(found, torch.optim.Optimizer):
        raise ConfigError(f"{flag} returns {type(found).__name__}, not a torch.optim.Optimizer")
    members = {p for group in found.param_groups for p in group["params"]}
    if left_out := [name for p, name in trained.items() if p not in members]:
        raise ConfigError(
            f"{flag} leaves out {len(left_out)} trained parameters, e.g. {left_out[0]}: put all of `groups` into it"
        )
    if len(members) > len(trained):
        raise ConfigError(f"{flag} has parameters that are not trained: put only parameters from `groups` into it")
    if options.lr_scale and any("lr_scale" not in group for group in found.param_groups):
        raise ConfigError(f"{flag} drops `lr_scale` of its groups, which --lr-scale sets: keep it")
    return found
