"""Whether the tokens of a model can be dealt over ranks; on meta, so that a refusal comes before the weights.

What is not seen here the probe at start sees: it compares logprobs of dealt tokens with those of the stock model.
"""

from torch import nn
from transformers import PreTrainedModel

from fsdptrain.config.sections import ParallelConfig
from fsdptrain.errors import ConfigError
from fsdptrain.features.context_parallel.recurrent import recurrent_mixers, unknown_kinds
from fsdptrain.model.structure import layer_config, projected_heads, stock_class


def check_dealing(model: PreTrainedModel, config: ParallelConfig) -> list[nn.Module]:
    """The mixers to gather around, so that tokens can be dealt as `config` says. ConfigError where they cannot."""
    size, tensor_size = config.context_parallel_size, config.tensor_parallel_size
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
