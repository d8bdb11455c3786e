"""Check on the meta model that its tokens can be split over ranks, before loading weights.

Other problems are detected by the probe at startup, which compares the logprobs of split tokens with the stock model.
"""

from torch import nn
from transformers import PreTrainedModel

from fsdptrain.errors import ConfigError
from fsdptrain.features.context_parallel.config import ContextParallelConfig
from fsdptrain.features.context_parallel.recurrent import recurrent_mixers, unknown_kinds
from fsdptrain.model.structure import layer_config, projected_heads, stock_class


def check_dealing(model: PreTrainedModel, config: ContextParallelConfig, *, tensor_size: int = 1) -> list[nn.Module]:
    """Return the mixers that need gathered tokens.

    Raises ConfigError if tokens cannot be split as `config` requires.
    """
    size = config.context_parallel_size
    gather = config.context_parallel_recurrent == "gather"
    name, text = stock_class(model).__name__, layer_config(model.config, 0)
    flag, way_out = f"--context-parallel-size {size}", "leave it out"
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
        raise ConfigError(f"{flag}: the attention of {name} is code of its own, which exchanges no heads: {way_out}")
    return list(mixers.values())
