"""The optimizers of --optimizer: a table of functions (groups, options) -> torch.optim.Optimizer.

`groups` are parameter groups of torch.optim, with names: `params` is a list of (name, parameter), the parameters are
DTensors if the model is sharded, `lr_scale` is the factor of --lr-scale, and `kind` is one of

    matrix      weights of linear layers and routers in decoder and vision layers [out, in], stacked experts [E, ., .]
    other       embeddings, head, convolutions, biases of stacked experts [E, .]
    vector      norms and biases, with weight decay 0

The function of a user has the same signature. State that is allocated here costs no memory later, and a checkpoint is
loaded into it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdptrain.config import OptimConfig
from fsdptrain.model.structure import repeated_layers
from fsdptrain.registry import Table, resolve

Groups = list[dict[str, Any]]
Build = Callable[[Groups, OptimConfig], torch.optim.Optimizer]
_FUSED = ("cpu", "cuda", "mps", "xpu")  # device types for which torch.optim.AdamW has a fused kernel
zeros_of: Callable[[Tensor], Tensor] = partial(torch.zeros_like, requires_grad=False)

OPTIMIZERS: Mapping[str, Build] = Table(
    {
        "adamw": "fsdptrain.fsdp.optimizers:adamw",
        "muon": "fsdptrain.fsdp.muon:muon",
        "sgd": "fsdptrain.fsdp.optimizers:sgd",
    }
)


def find_optimizer(config: OptimConfig) -> Build:
    """Return the function of --optimizer. Raises ConfigError if it cannot be imported or called."""
    return resolve(config.optimizer, OPTIMIZERS, flag="--optimizer", call=lambda f: f("groups", "options"))


def parameter_groups(names: Mapping[nn.Parameter, str], model: nn.Module, weight_decay: float) -> Groups:
    """Divide parameters by kind and by their factor in `model.lr_scales`, which `choose_trained` sets.

    names: of the trained parameters. Those that are not of the transformers `model` itself are no `matrix`.
    """
    members: dict[tuple[str, float], list[tuple[str, nn.Parameter]]] = {}
    scales = vars(model).get("lr_scales", {})
    matrices = _matrices(model) if isinstance(model, PreTrainedModel) else set()
    for p, name in names.items():
        kind = "vector" if p.ndim < 2 else "matrix" if p in matrices else "other"
        members.setdefault((kind, scales.get(name, 1.0)), []).append((name, p))
    return [
        {"params": params, "kind": kind, "lr_scale": scale, "weight_decay": weight_decay * (kind != "vector")}
        for (kind, scale), params in members.items()
    ]


def _matrices(model: PreTrainedModel) -> set[nn.Parameter]:
    """Return the weights [out, in] (Conv1D: [in, out]) of linear layers and routers in the layers, and stacked experts.

    Not: biases of experts [E, .], tables that are looked up, convolutions, and other parameters of mixers (A_log).
    """
    modules = [module for layer in repeated_layers(model) for module in layer.modules()]
    return {
        p
        for module in modules
        if not isinstance(module, nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        for name, p in module.named_parameters(recurse=False)
        if (p.ndim == 3 or (p.ndim == 2 and name == "weight")) and min(p.shape[-2:]) > 1
    }


def adamw(groups: Groups, options: OptimConfig) -> torch.optim.AdamW:
    """Create AdamW, with its moments on the host with --offload-optimizer."""
    params = [p for group in groups for _, p in group["params"]]
    fused = all(p.device.type in _FUSED for p in params)
    adam = torch.optim.AdamW(
        groups, lr=options.lr, betas=(options.adam_beta1, options.adam_beta2), eps=options.adam_eps, fused=fused
    )
    zeros, on_host = zeros_of, options.offload_optimizer
    if on_host:
        from fsdptrain.fsdp.host_adam import host_moment as zeros
    for p in params:
        step = torch.zeros((), dtype=torch.float32, device=p.device if fused and not on_host else "cpu")
        adam.state[p] = {"exp_avg": zeros(p), "exp_avg_sq": zeros(p), "step": step}
    return adam


def sgd(groups: Groups, options: OptimConfig) -> torch.optim.SGD:
    """Create SGD without momentum. Weight decay is added to the gradient, as in torch.optim.SGD."""
    return torch.optim.SGD(groups, lr=options.lr)
