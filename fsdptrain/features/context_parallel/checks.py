"""Refuse, on the meta model and before weights are loaded, models whose tokens cannot be split.

Other problems are detected by the probe at startup, which compares the logprobs of split tokens with the stock model.
"""

from torch import nn
from transformers import PreTrainedModel

from fsdptrain.errors import ConfigError
from fsdptrain.features.meta import projected_heads
from fsdptrain.features.sections import ContextParallelConfig
from fsdptrain.model.sizes import layer_config
from fsdptrain.model.structure import decoder_layers, stock_class

# Layers that mix tokens by attention over the whole sequence or a window, or not at all.
_STATELESS_KINDS = {"full_attention", "sliding_attention", "attention", "moe", "mlp"}


def check_context_parallel(model: PreTrainedModel, config: ContextParallelConfig, *, tensor_size: int = 1) -> None:
    """Raise ConfigError if tokens cannot be split as `config` requires."""
    size = config.context_parallel_size
    name, text = stock_class(model).__name__, layer_config(model.config, 0)
    flag, way_out = f"--context-parallel-size {size}", "remove it"
    heads = getattr(text, "num_attention_heads", None)
    counts = {f"attention heads of {name}": heads}
    counts |= {f"heads of {each} of {name}": n for each, n in projected_heads(model) if each.endswith(".q_proj")}
    for whose, count in counts.items():
        if count and count % (size * tensor_size):
            beside = f" x --tensor-parallel-size {tensor_size}" if tensor_size > 1 else ""
            raise ConfigError(f"{flag}{beside} must divide the {count} {whose}: choose a divisor")
    if mixer := _recurrent_mixer(model):
        raise ConfigError(
            f"{flag}: {mixer} of {name} carries a state along the sequence, whose tokens would be on other processes: "
            f"{way_out}"
        )
    kinds = sorted(set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _STATELESS_KINDS)
    if kinds or getattr(text, "attention_chunk_size", None):
        found = ", ".join(kinds) or "attention in chunks"
        raise ConfigError(f"{flag}: {name} mixes tokens by {found}, not by heads over whole sequences: {way_out}")
    if not model._supports_attention_backend:
        raise ConfigError(f"{flag}: the attention of {name} is custom code that does not exchange heads: {way_out}")


def _recurrent_mixer(model: PreTrainedModel) -> str:
    """Return the first module in a decoder layer with a convolution or a decay parameter, or ""."""
    names = {id(module): name for name, module in model.named_modules()}
    parts = (part for layer in decoder_layers(model) for part in layer.modules())
    stateful = (x for x in parts if isinstance(x, nn.Conv1d) or "A_log" in x._parameters)
    return next((names[id(part)] for part in stateful), "")
