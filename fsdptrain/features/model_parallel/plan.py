"""Plan tensor and expert parallelism from the parallel plans that transformers has for its models.

The plan needs only the model on meta and the sizes, no processes, so `plan` and a dry run reject what a run would.
`split_model` runs before FSDP, on the meta model; FSDP then shards the parts. The modules stay stock and get a forward
that moves tokens, or parts of hidden states, between ranks.
"""

import re
from collections.abc import Iterator
from typing import cast

import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed import tensor_parallel

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.fsdp.expert_shards import is_split
from fsdptrain.fsdp.mesh import EXPERT
from fsdptrain.model.sizes import layer_config
from fsdptrain.model.structure import decoder_layers, lm_head, stock_class

try:
    from transformers.distributed.expert_parallel import apply_expert_parallelism
except ImportError:  # before 5.21; before 5.19 there is none
    apply_expert_parallelism = getattr(tensor_parallel, "apply_expert_parallelism", None)

# 5.23: plans of names instead of rules, parts of any size, several dispatches
IS_NEW = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 23)
_rule_name = tensor_parallel.replace_layer_number_by_wildcard  # layers.3.mlp: layers.*.mlp
_COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output")  # split dim `out` of nn.Linear's [out, in]
_ROWS = ("rowwise", "rowwise_rep", "rowwise_split_input")  # split dim `in`
_PACKED = ("packed_colwise", "packed_rowwise")  # gate and up in one matrix, each split
_NORM_OF_HEADS = re.compile(r"(q|k|v)_(?:layer)?norm$")
_FIX = "remove it" if IS_NEW else "remove it, or install transformers 5.23, which has more plans"
_LEAST_SHARE = 0.5  # of the matrices of the layers; splitting less saves nothing

Styles = dict[str, str]  # of transformers, by names of modules and parameters


def split_plan_of(model: PreTrainedModel, config: Config) -> tuple[Styles, Styles]:
    """Return the split plan of a run. Raises ConfigError if the model does not support its sizes."""
    return split_plan(model, tensor_size=config.ranks_along("tensor"), expert_size=config.ranks_along("experts"))


def split_plan(model: PreTrainedModel, *, tensor_size: int, expert_size: int) -> tuple[Styles, Styles]:
    """Return how layers, without split experts, and experts of a model on meta or sharded are split over ranks.

    Raises ConfigError if the model does not support these sizes.
    """
    if tensor_size == expert_size == 1:
        return {}, {}
    if apply_expert_parallelism is None:
        raise ConfigError(
            "--tensor-parallel-size and --expert-parallel-size need transformers 5.19 or newer: install it, or leave "
            "them out"
        )
    experts = _expert_plan(model, expert_size) if expert_size > 1 else {}
    tensor = _tensor_plan(model, experts) if tensor_size > 1 else {}
    if tensor_size > 1:
        _check_activations(model, tensor_size)
        _check_heads(model, tensor, tensor_size)
        _check_tensors(model, tensor, experts, tensor_size)
    return tensor, experts


def _styles(model: PreTrainedModel, rules: Styles) -> Styles:
    """Return the styles of `rules`, which have `*` for the number of a layer. A parameter has that of its module."""
    styles = {}
    for name, module in model.named_modules():
        style = rules.get(_rule_name(name))
        for parameter_name, _ in module.named_parameters(name, recurse=False):
            styles[parameter_name] = rules.get(_rule_name(parameter_name), style)
        styles[name] = style
    return {name: style for name, style in styles.items() if style}


def is_tied(model: PreTrainedModel) -> bool:
    return lm_head(model).weight is cast(nn.Module, model.get_input_embeddings()).weight


def _tensor_plan(model: PreTrainedModel, experts: Styles) -> Styles:
    plan = _styles(model, model.tp_plan)
    plan = {
        name: style for name, style in plan.items() if not any(f"{name}.".startswith(f"{other}.") for other in experts)
    }
    plan |= dict.fromkeys(_forgotten_norms(model, plan), "replicated_with_grad_allreduce")
    if is_tied(model):
        names = {id(module): name for name, module in model.named_modules()}
        head, embedding = names[id(lm_head(model))], names[id(model.get_input_embeddings())]
        plan.pop(f"{head}.weight", None)  # one parameter, owned by the embedding
        if f"{embedding}.weight" not in plan:
            plan.pop(head, None)
    return plan


def _forgotten_norms(model: PreTrainedModel, plan: Styles) -> Iterator[str]:
    """Yield the norms of split heads that the plan omits.

    Some plans omit them (GLM-4.5, Phi) as if they saw all heads. `check_backward` detects other cases at startup.
    """
    for name, module in model.named_modules():
        norm = _NORM_OF_HEADS.search(name)
        if norm and name not in plan and next(module.parameters(), None) is not None:
            projection = f"{name[: norm.start()]}{norm[1]}_proj"
            if plan.get(projection) == "colwise":
                yield name


def _expert_plan(model: PreTrainedModel, size: int) -> Styles:
    name = stock_class(model).__name__
    plan = _styles(model, model.ep_plan or {})
    plan = {key: style for key, style in plan.items() if style in ("grouped_gemm", "ep_dispatch_experts")}
    if "ep_dispatch_experts" not in plan.values():
        raise ConfigError(
            f"--expert-parallel-size {size}: transformers has no plan that splits experts of {name}: {_FIX}"
        )
    for count in sorted({p.shape[0] for key, p in model.named_parameters() if key in plan}):
        if count % size:
            raise ConfigError(
                f"--expert-parallel-size {size} must divide the {count} experts of {name}: choose a divisor"
            )
    return plan


def _dim(name: str, parameter: nn.Parameter, tensor: Styles) -> int | None:
    """Return the dim of `parameter` that its style splits, or None if it is replicated."""
    style, last = tensor.get(name), parameter.dim() - 1
    if style in _COLUMNS:
        return max(0, last - 1)
    if style in _ROWS:
        return None if name.endswith(".bias") else last
    return {"embedding_rowwise": 0, "embedding_colwise": 1}.get(style or "")


def _check_activations(model: PreTrainedModel, size: int) -> None:
    """Raise ConfigError for activation sparsity (Gemma 3n).

    It compares activations with the mean and deviation over the whole token. A part has other statistics, and no error
    would show it.
    """
    if any(getattr(model.config.get_text_config(), "activation_sparsity_pattern", None) or ()):
        raise ConfigError(
            f"--tensor-parallel-size {size}: {stock_class(model).__name__} drops activations by the mean of a whole "
            "layer (activation_sparsity_pattern), of which each process would have a part: remove it"
        )


def _check_heads(model: PreTrainedModel, plan: Styles, size: int) -> None:
    """Raise ConfigError if the heads are not divisible. The first forward pass would fail with wrong shapes."""
    text = layer_config(model.config, 0)
    counts = {
        "attention heads": getattr(text, "num_attention_heads", None),
        "key-value heads": getattr(text, "num_key_value_heads", None),
    }
    counts |= {f"heads of {name}": n for name, n in _projected_heads(model) if plan.get(name) == "colwise"}
    for what, count in counts.items():
        if count and count % size:
            raise ConfigError(
                f"--tensor-parallel-size {size} must divide the {count} {what} of {stock_class(model).__name__}: "
                "choose a divisor"
            )


def _check_tensors(model: PreTrainedModel, tensor: Styles, experts: Styles, size: int) -> None:
    """Raise ConfigError if a matrix is not divisible, or if the plan splits too little."""
    name, parameters = stock_class(model).__name__, dict(model.named_parameters())
    inside = {p for layer in decoder_layers(model) for p in layer.parameters()}
    matrices = {parameter_name: p for parameter_name, p in parameters.items() if p in inside and p.dim() >= 2}
    dims = {parameter_name: _dim(parameter_name, p, tensor) for parameter_name, p in parameters.items()}
    for parameter_name, p in (matrices if IS_NEW else parameters).items():
        if tensor.get(parameter_name) in _PACKED:
            raise ConfigError(
                f"--tensor-parallel-size {size} splits gate and up within {parameter_name} of {name}, which no "
                "checkpoint could hold: shard the experts with --expert-parallel-size, or remove it"
            )
        dim = dims[parameter_name]
        if dim is not None and p.shape[dim] % size:
            fix = "choose another size" if parameter_name in matrices else "install transformers 5.23"
            raise ConfigError(
                f"--tensor-parallel-size {size} does not divide {parameter_name} {list(p.shape)} of {name}: {fix}"
            )
    split = sum(p.numel() for n, p in matrices.items() if dims[n] is not None or n in experts)
    share = split / sum(p.numel() for p in matrices.values())
    if share < _LEAST_SHARE:
        raise ConfigError(
            f"--tensor-parallel-size {size}: the plan of transformers splits {share:.0%} of the layers of {name}, and "
            f"every process would hold and compute the rest: {_FIX}"
        )


def split_model(model: PreTrainedModel, *, tensor: DeviceMesh, experts: DeviceMesh | None) -> None:
    """Split `model` over `tensor` (if larger than one rank) and `experts`.

    Raises ConfigError if the model does not support the sizes.
    """
    plans = split_plan(model, tensor_size=tensor.size(), expert_size=1 if experts is None else experts.size())
    if not IS_NEW:  # by rules
        plans = ({_rule_name(name): style for name, style in plan.items()} for plan in plans)
    layers_plan, experts_plan = plans
    if tensor.size() > 1:
        tied = is_tied(model)
        tensor_parallel.apply_tensor_parallelism(model, tensor, layers_plan)
        if tied:
            lm_head(model).weight = cast(nn.Module, model.get_input_embeddings()).weight
    if experts is not None:
        assert apply_expert_parallelism is not None
        dispatch = ("all_to_all",) if IS_NEW else ()  # `auto` differs without gradients
        apply_expert_parallelism(model, experts, tensor, experts_plan, *dispatch)
        for module in model.modules():
            if tensor.size() > 1 and any(is_split(p, EXPERT) for p in module.parameters(recurse=False)):
                # FSDP registers its hook on the output: of a view, an in-place operation loses it
                module.register_forward_hook(lambda module, args, output: output.clone())


def _projected_heads(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Yield (name, heads) for each query, key or value projection of a decoder layer.

    The attention module must have `head_dim`. In some families the number of heads of a layer differs from that in the
    config (Gemma 4, Laguna).
    """
    names = {module: name for name, module in model.named_modules()}
    for module in (module for layer in decoder_layers(model) for module in layer.modules()):
        width = vars(module).get("head_dim")
        for child_name, child in module.named_children():
            if child_name in ("q_proj", "k_proj", "v_proj") and isinstance(child, nn.Linear) and isinstance(width, int):
                heads, rest = divmod(child.weight.shape[0], width)
                if not rest:
                    yield names[child], heads
