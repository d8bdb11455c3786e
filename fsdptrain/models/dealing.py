"""Whether the tokens of a model can be dealt over ranks; on meta, so that a refusal comes before the weights.

What is not seen here the probe at start sees: it compares logprobs of dealt tokens with those of the stock model.
"""

from transformers import PreTrainedModel

from fsdptrain.errors import ConfigError
from fsdptrain.models.context import Context
from fsdptrain.models.recurrent import GatheredMixer, gather_around, recurrent_mixers, unknown_kinds
from fsdptrain.models.structure import stock_class


def deal_tokens(model: PreTrainedModel, context: Context, *, tensor_size: int, gather: bool) -> list[GatheredMixer]:
    """The mixers that were gathered around. ConfigError where the model does not allow it.

    tensor_size: ranks over which heads are split already. gather: as --context-parallel-recurrent says.
    """
    name, text = stock_class(model).__name__, model.config.get_text_config()
    flag = f"--context-parallel-size {context.size}"
    heads = getattr(text, "num_attention_heads", None)
    if heads and heads % (context.size * tensor_size):
        beside = f" x --tensor-parallel-size {tensor_size}" if tensor_size > 1 else ""
        raise ConfigError(f"{flag}{beside} must divide the {heads} attention heads of {name}: choose a divisor")
    kinds, mixers = unknown_kinds(model), recurrent_mixers(model)
    if kinds or getattr(text, "attention_chunk_size", None):
        raise ConfigError(
            f"{flag}: {name} mixes tokens by {', '.join(kinds) or 'attention in chunks'}, which does not go through "
            "heads of whole sequences: leave it out"
        )
    if mixers and not gather:
        raise ConfigError(
            f"{flag}: {next(iter(mixers))} of {name} carries a state along the sequence, whose tokens would be on "
            "other processes: leave it out, or add --context-parallel-recurrent gather"
        )
    if not mixers and gather:
        raise ConfigError(
            f"--context-parallel-recurrent gather has no effect on {name}, which has no state: leave it out"
        )
    if not mixers and not model._supports_attention_backend:
        raise ConfigError(
            f"{flag}: the attention of {name} is code of its own, which nothing can exchange heads for: leave it out"
        )
    return [gather_around(mixer, context) for mixer in mixers.values()]
