"""Mixers that carry a state along the sequence, where its tokens are dealt over ranks: they are gathered around.

Such a mixer (a convolution, Mamba, Gated DeltaNet) gets the tokens of all ranks, computes all of them on each, and each
rank keeps its own. That is exact, and every rank does the whole of the mixer's work.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdptrain.features.context_parallel.ulysses import UlyssesGroup
from fsdptrain.model.structure import decoder_layers

# Layers that mix tokens by attention over the whole sequence or a window, or not at all.
_STATELESS_KINDS = {"full_attention", "sliding_attention", "attention", "moe", "mlp"}
_HIDDEN = "hidden_states"


class GatheredMixer:
    """The forward of a mixer over the tokens of all ranks, while it is `active`."""

    def __init__(self, stock: Callable[..., Any], context: UlyssesGroup) -> None:
        self.active = True  # as in the last forward pass, which a recomputation in the backward pass follows
        self._stock = stock
        self._context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self._stock(*args, **kwargs)
        shape = (args[0] if args else kwargs[_HIDDEN]).shape[:2]

        def whole(value: Any) -> Any:  # what is said of each token: positions too
            of_tokens = isinstance(value, Tensor) and value.shape[:2] == shape
            return self._context.all_columns(value) if of_tokens else value

        found = self._stock(*map(whole, args), **{name: whole(value) for name, value in kwargs.items()})
        own = self._context.own_columns
        return (own(found[0]), *found[1:]) if isinstance(found, tuple) else own(found)


def recurrent_mixers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """By name, the parts of decoder layers with a state: told by a convolution along the sequence or a decay."""
    names = {id(module): name for name, module in model.named_modules()}
    parts = [part for layer in decoder_layers(model) for part in layer.children()]
    return {names[id(part)]: part for part in parts if any(map(has_state, part.modules()))}


def unknown_kinds(model: PreTrainedModel) -> list[str]:
    """What the config calls layers that are not attention, and in which no mixer was found."""
    layers = decoder_layers(model)
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    if len(kinds) != len(layers):
        return sorted(set(kinds) - _STATELESS_KINDS)
    named = zip(kinds, layers, strict=True)
    return sorted({k for k, layer in named if k not in _STATELESS_KINDS and not any(map(has_state, layer.modules()))})


def gather_around(mixer: nn.Module, context: UlyssesGroup) -> GatheredMixer:
    """Replace the forward of `mixer`, before sharding."""
    gathered = GatheredMixer(mixer.forward, context)
    mixer.forward = gathered
    return gathered


def has_state(module: nn.Module) -> bool:
    """Of this module itself, and not of its parts."""
    return isinstance(module, nn.Conv1d) or "A_log" in module._parameters
