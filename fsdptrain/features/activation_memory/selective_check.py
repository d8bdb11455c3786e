"""Check on a small random copy of the model that selective checkpointing works, before the model is loaded."""

import torch
from transformers import PreTrainedConfig

from fsdptrain.errors import ConfigError
from fsdptrain.features.activation_memory.checkpointing import enable_gradient_checkpointing
from fsdptrain.model.probes.random_copy import guarded_copy

_TOKENS = 16


def check_selective(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Raise ConfigError for a model that changes saved results in place, as gpt_oss does when it adds its biases."""
    model = guarded_copy(config, trust_remote_code=trust_remote_code)
    model.set_attn_implementation("eager")  # the attention of a run is never changed in place
    enable_gradient_checkpointing(model, kind="selective")
    vocab_size = model.config.get_text_config().vocab_size
    tokens = torch.randint(1, vocab_size, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    try:
        model(input_ids=tokens, use_cache=False).logits.sin().sum().backward()
    except RuntimeError as error:
        if "has been mutated" not in str(error):
            raise
        raise ConfigError(
            f"--gradient-checkpointing-kind selective does not work with {config.model_type}, which changes results of "
            "matrix products in place: use --gradient-checkpointing-kind full"
        ) from error
