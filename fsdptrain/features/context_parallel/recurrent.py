"""Gather the tokens around mixers that carry a state along the sequence.

Such a mixer (a convolution, Mamba, Gated DeltaNet) runs on the tokens of all ranks, on every rank, and each rank keeps
its own tokens. The result is exact; every rank does all of the mixer's work.

`check_context_parallel` refuses, on the meta model and before weights are loaded, models whose tokens cannot be split.
Other problems are detected by the probe at startup, which compares the logprobs of split tokens with the stock model.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdptrain.errors import ConfigError
from fsdptrain.features.context_parallel.config import ContextParallelConfig
from fsdptrain.features.context_parallel.ulysses import UlyssesGroup
from fsdptrain.model.structure import decoder_layers, layer_config, projected_heads, stock_class

# Layers that mix tokens by attention over the whole sequence or a window, or not at all.
_STATELESS_KINDS = {"full_attention", "sliding_attention", "attention", "moe", "mlp"}
_HIDDEN = "hidden_states"


class GatheredMixer:
    """The forward of a mixer over the tokens of all ranks of `group`."""

    def __init__(self, stock: Callable[..., Any]) -> None:
        self.group: UlyssesGroup | None = None  # None: this rank has whole rows
        self._stock = stock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        group = self.group
        if group is None:
            return self._stock(*args, **kwargs)
        shape = (args[0] if args else kwargs[_HIDDEN]).shape[:2]

        def gathered(value: Any) -> Any:
            per_token = isinstance(value, Tensor) and value.shape[:2] == shape
            return group.all_columns(value) if per_token else value

        output = self._stock(*map(gathered, args), **{name: gathered(value) for name, value in kwargs.items()})
        own = group.own_columns
        return (own(output[0]), *output[1:]) if isinstance(output, tuple) else own(output)


def recurrent_mixers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the stateful parts of decoder layers by name, detected by a convolution or a decay parameter."""
    names = {id(module): name for name, module in model.named_modules()}
    parts = [part for layer in decoder_layers(model) for part in layer.children()]
    return {names[id(part)]: part for part in parts if any(map(has_state, part.modules()))}


def unknown_kinds(model: PreTrainedModel) -> list[str]:
    """Return the layer types in the config that are not attention and in which no mixer was detected."""
    layers = decoder_layers(model)
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    if len(kinds) != len(layers):
        return sorted(set(kinds) - _STATELESS_KINDS)
    named = zip(kinds, layers, strict=True)
    return sorted({k for k, layer in named if k not in _STATELESS_KINDS and not any(map(has_state, layer.modules()))})


def gather_around(mixer: nn.Module) -> GatheredMixer:
    """Replace the forward of `mixer`. Call it before sharding."""
    gathered = GatheredMixer(mixer.forward)
    mixer.forward = gathered
    return gathered


def has_state(module: nn.Module) -> bool:
    """Return whether the module itself has a state, ignoring its submodules."""
    return isinstance(module, nn.Conv1d) or "A_log" in module._parameters


def check_context_parallel(
    model: PreTrainedModel, config: ContextParallelConfig, *, tensor_size: int = 1
) -> list[nn.Module]:
    """Return the mixers that need gathered tokens.

    Raises ConfigError if tokens cannot be split as `config` requires.
    """
    size = config.context_parallel_size
    gather = config.context_parallel_recurrent == "gather"
    name, text = stock_class(model).__name__, layer_config(model.config, 0)
    flag, way_out = f"--context-parallel-size {size}", "remove it"
    heads = getattr(text, "num_attention_heads", None)
    counts = {f"attention heads of {name}": heads}
    counts |= {f"heads of {each} of {name}": n for each, n in projected_heads(model) if each.endswith(".q_proj")}
    for whose, count in counts.items():
        if count and count % (size * tensor_size):
            beside = f" x --tensor-parallel-size {tensor_size}" if tensor_size > 1 else ""
            raise ConfigError(f"{flag}{beside} must divide the {count} {whose}: choose a divisor")
    kinds, mixers = unknown_kinds(model), recurrent_mixers(model)
    if kinds or getattr(text, "attention_chunk_size", None):
        found = ", ".join(kinds) or "attention in chunks"
        raise ConfigError(f"{flag}: {name} mixes tokens by {found}, not by heads over whole sequences: {way_out}")
    if mixers and not gather:
        raise ConfigError(
            f"{flag}: {next(iter(mixers))} of {name} carries a state along the sequence, whose tokens would be on "
            f"other processes: {way_out}, or add --context-parallel-recurrent gather"
        )
    if gather and not mixers:
        raise ConfigError(f"--context-parallel-recurrent gather has no effect on {name}, which has no state: {way_out}")
    if not mixers and not model._supports_attention_backend:
        raise ConfigError(f"{flag}: the attention of {name} is custom code that does not exchange heads: {way_out}")
    return list(mixers.values())
