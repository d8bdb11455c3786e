"""Describe the built model: parallel sizes, modules and kernels. `weights` and `parity` check it."""

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.megatron.cpu_shims import require_megatron
from fsdptrain.megatron.groups import process_groups
from fsdptrain.megatron.model import has_transformer_engine
from fsdptrain.model.probes.kernels import Kernel, recurrent_kernels


def report_lines(model: nn.ModuleList, *, layout: str) -> list[str]:
    """Return log lines about this rank's stage: the parallel sizes, and the number of modules of each class."""
    groups = process_groups()
    names = {"tensor": groups.tp, "pipeline": groups.pp, "expert": groups.ep, "data": groups.dp_cp}
    sizes = ", ".join(f"{name} {group.size()}" for name, group in names.items())
    counts = Counter(type(module).__name__ for module in model.modules())
    classes = [f"{count} {name}" for name, count in counts.items() if name not in ("ModuleList", "Identity")]
    kind = "Transformer Engine" if has_transformer_engine() else "plain"
    return [
        f"megatron-core {require_megatron()}, {kind} layers, {layout} rows; {dist.get_world_size()} ranks: {sizes}",
        f"modules: {', '.join(classes)}",
    ]


def kernels_of(model: nn.ModuleList, stock: PreTrainedModel) -> list[Kernel]:
    """Describe the kernels. `stock`: the transformers model, whose layers determine the kernels of its mixers."""
    found, engine = list[Kernel](), has_transformer_engine()
    mixers = dict.fromkeys(type(module).__name__ for module in model.modules() if "hub_name" in vars(module))
    if mixers:
        found.append(Kernel("mixers", f"of transformers, whole on each process: {', '.join(mixers)}"))
        found += recurrent_kernels(stock, platform.device_type())
    if not engine and platform.has_accelerator():
        found.append(Kernel("layers", "plain torch", "Transformer Engine", "it does not import here"))
    elif any(type(module).__name__ == "SelfAttention" for module in model.modules()):
        found.append(Kernel("attention", f"megatron-core, {'Transformer Engine' if engine else 'plain torch'}"))
    config: Any = model[0].config
    if config.num_moe_experts:
        found.append(Kernel("experts", f"megatron-core, {config.moe_token_dispatcher_type}"))
    return found
