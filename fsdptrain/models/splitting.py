"""Layers and experts split over ranks, by the plans that transformers has for its own models.

Before FSDP, which shards over its own axes what is left of each parameter; the model is on meta. Nothing is copied into
the model: its modules stay stock, and get a forward that moves tokens, or parts of hidden states, between the ranks.
"""

from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel

from fsdptrain.errors import ConfigError
from fsdptrain.models.structure import decoder_layers, expert_choice, lm_head, stock_class

_LEAST_SHARE = 0.5  # of the matrices of the layers that must be split: less of them saves nothing


def split_model(model: PreTrainedModel, *, tensor: DeviceMesh, experts: DeviceMesh | None) -> None:
    """Over `tensor` (where it is more than one rank) and `experts`. ConfigError where the model does not allow it."""
    try:
        from transformers.distributed.expert_parallel import apply_expert_parallelism
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise ConfigError(
            "--tensor-parallel-size and --expert-parallel-size need transformers 5.23 or newer: install it, or leave "
            "them out"
        ) from error
    expert_plan = {} if experts is None else _expert_plan(model, experts.size())
    if tensor.size() > 1:
        head, embedding = lm_head(model), cast(nn.Module, model.get_input_embeddings())
        tied = head.weight is embedding.weight
        apply_tensor_parallelism(model, tensor, _tensor_plan(model, expert_plan, tied=tied))
        if tied:
            head.weight = embedding.weight
    if experts is not None:
        apply_expert_parallelism(model, experts, tensor, expert_plan, "all_to_all")
    if tensor.size() > 1:
        _check_split(model, tensor)


def _tensor_plan(model: PreTrainedModel, expert_plan: dict[str, str], *, tied: bool) -> dict[str, str]:
    """Name of a module or parameter to what is done with it; without what `expert_plan` deals with."""
    plan = cast(Any, model)._expand_parallel_plan(model.tp_plan)
    plan = {name: style for name, style in plan.items() if not any(_is_in(name, other) for other in expert_plan)}
    if tied:
        names = {id(module): name for name, module in model.named_modules()}
        head, embedding = names[id(lm_head(model))], names[id(model.get_input_embeddings())]
        plan.pop(f"{head}.weight", None)  # one parameter, and the embedding owns it
        if f"{embedding}.weight" not in plan:
            plan.pop(head, None)
    return plan


def _expert_plan(model: PreTrainedModel, size: int) -> dict[str, str]:
    name = stock_class(model).__name__
    plan = cast(Any, model)._expand_parallel_plan(model.ep_plan or {})
    plan = {key: style for key, style in plan.items() if style in ("grouped_gemm", "ep_dispatch_experts")}
    if "ep_dispatch_experts" not in plan.values():
        raise ConfigError(
            f"--expert-parallel-size {size}: transformers has no plan that splits experts of {name}: leave it out"
        )
    choice = expert_choice(model.config)
    if choice is not None and choice.num_experts % size:
        raise ConfigError(
            f"--expert-parallel-size {size} must divide the {choice.num_experts} experts of {name}: choose a divisor"
        )
    return plan


def _is_in(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.")


def _check_split(model: PreTrainedModel, tensor: DeviceMesh) -> None:
    """Heads and widths that do not divide give wrong shapes in the first forward pass; a plan may also do nothing."""
    name, size = stock_class(model).__name__, tensor.size()
    text = model.config.get_text_config()
    for what, key in (("attention heads", "num_attention_heads"), ("key-value heads", "num_key_value_heads")):
        count = getattr(text, key, None)
        if count and count % size:
            raise ConfigError(
                f"--tensor-parallel-size {size} must divide the {count} {what} of {name}: choose a divisor"
            )
    matrices = {n: p for layer in decoder_layers(model) for n, p in layer.named_parameters() if p.dim() >= 2}
    split = {n: p for n, p in matrices.items() if isinstance(p, DTensor)}
    for parameter_name, p in split.items():
        if p.device_mesh != tensor:
            continue
        if any(p.shape[x.dim] % size for x in p.placements if isinstance(x, Shard)):
            raise ConfigError(
                f"--tensor-parallel-size {size} does not divide {parameter_name} {list(p.shape)} of {name}: choose "
                "another size"
            )
        if any(isinstance(x, _StridedShard) for x in p.placements):
            raise ConfigError(
                f"--tensor-parallel-size {size} splits gate and up within {parameter_name} of {name}, which no "
                "checkpoint could hold: deal the experts by --expert-parallel-size, or leave it out"
            )
    share = sum(p.numel() for p in split.values()) / sum(p.numel() for p in matrices.values())
    if share < _LEAST_SHARE:
        raise ConfigError(
            f"--tensor-parallel-size {size}: the plan of transformers splits {share:.0%} of the layers of {name}, and "
            "every process would hold and compute the rest: leave it out"
        )
