"""Where the parts of a transformers model are, whatever its authors called them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain.errors import CheckpointError

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")


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


def stock_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class that transformers knows: sharding makes a subclass, by another name and in another file."""
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


@contextmanager
def as_stock(model: PreTrainedModel) -> Iterator[None]:
    """Inside, `model` is of its stock class, by whose name and file transformers finds conversions and initialisers.

    It takes any other class for custom code, and leaves buffers that no file holds as they are: uninitialised.
    """
    own_class = type(model)
    model.__class__ = stock_class(model)
    try:
        yield
    finally:
        model.__class__ = own_class


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks of the language model, in the order of the model; the same before and after sharding.

    They are the members of a ModuleList whose class transformers itself never splits over devices
    (`_no_split_modules`); where a model does not declare any, the members of its largest ModuleList.
    """
    unsplit = set(model._no_split_modules or ())
    lists = _outermost_lists(language_model(model))
    layers = [layer for module_list in lists for layer in module_list if _class_names(layer) & unsplit]
    if layers:
        return layers
    lists = [module_list for module_list in lists if len(module_list) > 0]
    if not lists:
        raise CheckpointError(f"{type(model).__name__} has no repeated layers: fsdptrain shards a model layer by layer")
    return list(max(lists, key=_numel))


def tower_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks outside of the language model: those of a vision tower. None in a model of text alone."""
    unsplit = set(model._no_split_modules or ())
    inside = set(language_model(model).modules())
    outside = [x for x in _outermost_lists(model) if x not in inside]
    return [layer for module_list in outside for layer in module_list if _class_names(layer) & unsplit]


def repeated_layers(model: PreTrainedModel) -> list[nn.Module]:
    """What is sharded block by block: the layers of a vision tower, then those of the language model."""
    return [*tower_layers(model), *decoder_layers(model)]


def parameters_outside(model: PreTrainedModel) -> list[nn.Parameter]:
    """Those of no repeated layer: embedding, last norm, head."""
    inside = {p for layer in repeated_layers(model) for p in layer.parameters()}
    return [p for p in model.parameters() if p not in inside]


def language_model(model: PreTrainedModel) -> nn.Module:
    """The part that reads tokens: of a vision-language model the one that its text config describes, else the base."""
    base, text = base_model(model), model.config.get_text_config()
    if text is model.config:
        return base
    return next((m for m in base.modules() if isinstance(m, PreTrainedModel) and m.config is text), base)


def vision_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Those of the parts that no token of text meets: tower, projector. Empty in a model of text alone."""
    text = {p for part in (language_model(model), lm_head(model)) for p in part.parameters()}
    return {name: p for name, p in model.named_parameters() if p not in text}


def freeze_vision(model: PreTrainedModel) -> None:
    """Train nothing but the language model. No change to a model of text alone."""
    for parameter in vision_parameters(model).values():
        parameter.requires_grad_(False)


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
    layers = [_numel(layer) for layer in repeated_layers(model)]
    trained_layers = [_numel(layer, only_trained=True) for layer in repeated_layers(model)]
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
    """Those that one token of text meets. Embeddings and head count."""
    return round(sum(active_sizes(model).values()))


def active_sizes(model: PreTrainedModel) -> dict[nn.Parameter, float]:
    """How many numbers of each parameter one token of text meets: of routed experts as many as it is sent to."""
    unseen = set(vision_parameters(model).values())
    sizes: dict[nn.Parameter, float] = {p: p.numel() for p in model.parameters() if p not in unseen}
    choice = expert_choice(model.config)
    for module in (inner for layer in decoder_layers(model) for inner in layer.modules()):
        fused = not isinstance(module, nn.ModuleList)
        count = num_fused_experts(module) if fused else len(module)
        if choice and count > choice.top_k:
            for p in module.parameters(recurse=not fused):
                if not fused or p.shape[0] == count:  # biases of fused experts have a row for each of them too
                    sizes[p] = p.numel() * choice.top_k / count
    return sizes


def layer_config(config: PreTrainedConfig, index: int) -> PreTrainedConfig:
    """Of the text layer number `index`: where layers differ (Gemma 4) a config does not say for all what heads are."""
    text = config.get_text_config()
    return text.per_layer_config[index] if getattr(text, "is_heterogeneous", False) else text  # not before 5.23


def head_size(config: PreTrainedConfig) -> int:
    """Of a model that does not say it, as most do."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def head_widths(config: PreTrainedConfig) -> tuple[int, int]:
    """(of queries and keys, of values) of a head: multi-head latent attention has two, and `head_size` is neither."""
    own = head_size(config)
    return getattr(config, "qk_head_dim", None) or own, getattr(config, "v_head_dim", None) or own


def projected_heads(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """(name, heads) of each projection to queries, keys or values of a decoder layer whose attention says how wide a
    head is: some families have layers with other heads than the config counts (Gemma 4, Laguna)."""
    names = {module: name for name, module in model.named_modules()}
    for module in (module for layer in decoder_layers(model) for module in layer.modules()):
        width = vars(module).get("head_dim")
        for child_name, child in module.named_children():
            if child_name in _PROJECTIONS and isinstance(child, nn.Linear) and isinstance(width, int):
                heads, rest = divmod(child.weight.shape[0], width)
                if not rest:
                    yield names[child], heads


def expert_choice(config: PreTrainedConfig) -> ExpertChoice | None:
    """What the config says; None for a model without experts."""
    text = config.get_text_config()
    found = [
        next((n for n in (getattr(text, key, None) for key in keys) if n), None) for keys in (_EXPERTS, TOP_K_KEYS)
    ]
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
