"""Where the parts of a transformers model are, whatever its authors called them."""

from dataclasses import dataclass
from typing import NamedTuple, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain.errors import CheckpointError

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")


@dataclass(frozen=True)
class ParameterCounts:
    """How many numbers a model has; tied weights count once."""

    total: int
    largest_layer: int  # of the largest decoder layer
    outside_layers: int  # embedding, last norm, head
    frozen: int = 0  # of the total: what is not trained
    most_trained: int | None = None  # in one decoder layer, or outside of them; None: as many as there are
    adapter: int = 0  # of the total: what LoRA has added

    @property
    def reduced_at_once(self) -> int:
        """Gradients of one group, the largest."""
        return max(self.largest_layer, self.outside_layers) if self.most_trained is None else self.most_trained


class ExpertChoice(NamedTuple):
    """What a router does for each token: it takes `top_k` of `num_experts`."""

    num_experts: int
    top_k: int


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, in the order of the model; the same before and after sharding.

    They are the members of a ModuleList whose class transformers itself never splits over devices
    (`_no_split_modules`); where a model does not declare any, the members of its largest ModuleList.
    """
    unsplit = set(model._no_split_modules or ())
    layers: list[nn.Module] = []
    for module_list in _outermost_lists(model):
        layers += [layer for layer in module_list if _class_names(layer) & unsplit]
    if layers:
        return layers
    lists = [module_list for module_list in _outermost_lists(model) if len(module_list) > 0]
    if not lists:
        raise CheckpointError(f"{type(model).__name__} has no repeated layers: fsdptrain shards a model layer by layer")
    return list(max(lists, key=_numel))


def base_model(model: PreTrainedModel) -> nn.Module:
    """The part that makes hidden states: everything but the head."""
    base = model.base_model
    if base is not model:
        return base
    inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    if len(inner) != 1:
        raise CheckpointError(f"{type(model).__name__} has no one part that makes hidden states")
    return inner[0]  # llama4's language model names a prefix that it does not have


def lm_head(model: PreTrainedModel) -> nn.Module:
    """The module that turns hidden states into logits. CheckpointError where there is none."""
    head = model.get_output_embeddings()
    if head is None:
        raise CheckpointError(f"{type(model).__name__} has no output embedding: it is not a causal language model")
    return head


def count_parameters(model: PreTrainedModel) -> ParameterCounts:
    """Exact counts, from the shapes: the model may be on meta, and sharded."""
    total, trained = _numel(model), _numel(model, only_trained=True)
    layers = [_numel(layer) for layer in decoder_layers(model)]
    trained_layers = [_numel(layer, only_trained=True) for layer in decoder_layers(model)]
    return ParameterCounts(
        total=total,
        largest_layer=max(layers),
        outside_layers=total - sum(layers),
        frozen=total - trained,
        most_trained=max(*trained_layers, trained - sum(trained_layers)),
        adapter=sum(p.numel() for name, p in model.named_parameters() if is_of_adapter(name)),
    )


def is_of_adapter(name: str) -> bool:
    """Whether a parameter of this name is peft's: stock models have frozen ones too, such as biases of routers."""
    return ".lora_" in name


def count_active_parameters(model: PreTrainedModel) -> int:
    """Those that one token meets. Embeddings and head count."""
    return round(sum(active_sizes(model).values()))


def active_sizes(model: PreTrainedModel) -> dict[nn.Parameter, float]:
    """How many numbers of each parameter one token meets: of routed experts only as many as it is sent to."""
    sizes: dict[nn.Parameter, float] = {p: p.numel() for p in model.parameters()}
    choice = expert_choice(model.config)
    for module in (inner for layer in decoder_layers(model) for inner in layer.modules()):
        fused = not isinstance(module, nn.ModuleList)
        count = num_fused_experts(module) if fused else len(module)
        if choice and count > choice.top_k:
            for p in module.parameters(recurse=not fused):
                if not fused or p.shape[0] == count:  # biases of fused experts have a row for each of them too
                    sizes[p] = p.numel() * choice.top_k / count
    return sizes


def expert_choice(config: PreTrainedConfig) -> ExpertChoice | None:
    """What the config says; None for a model without experts."""
    text = config.get_text_config()
    found = [next((n for n in (getattr(text, key, None) for key in keys) if n), None) for keys in (_EXPERTS, _TOP_K)]
    num_experts, top_k = found
    return ExpertChoice(num_experts, top_k) if num_experts and top_k else None


def num_fused_experts(module: nn.Module) -> int:
    """How many experts lie in the tensors of this very module, [E, ., .] each; 0: it is nothing of that kind."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return 0
    return next((p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3), 0)


def reshard(model: nn.Module) -> None:
    """Free what is gathered, in every group, so that parameters are DTensors and the next forward gathers anew."""
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for group in reversed(groups):  # children first: what is left gathered in a parent is then its own
        group.reshard()
        if any(not isinstance(p, DTensor) for p in cast(nn.Module, group).parameters()):
            # A forward that broke off: the group takes itself to be inside it, and stays gathered as it should there.
            group.set_reshard_after_forward(True, recurse=False)
            group.reshard()
            group.set_reshard_after_forward(False, recurse=False)


def _outermost_lists(model: nn.Module) -> list[nn.ModuleList]:
    """Every ModuleList that does not lie within another one (as the experts of a layer do)."""
    found: list[nn.ModuleList] = []
    for child in model.children():
        found += [child] if isinstance(child, nn.ModuleList) else _outermost_lists(child)
    return found


def _class_names(module: nn.Module) -> set[str]:
    """With those of its bases: sharding changes the class of a module to a subclass."""
    return {cls.__name__ for cls in type(module).__mro__}


def _numel(module: nn.Module, *, only_trained: bool = False) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not only_trained)
