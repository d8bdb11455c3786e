"""The model of a run on the meta device, for checks that need only its config.json, and the heads to split."""

from collections.abc import Iterator
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.model.loading.meta import build_meta_model
from fsdptrain.model.structure import decoder_layers


def meta_model_of(checkpoint: Path, config: Config) -> PreTrainedModel:
    """Build the model of `checkpoint`, the folder of --hf-checkpoint, on the meta device."""
    return build_meta_model(checkpoint, trust_remote_code=config.model.trust_remote_code, attn_implementation="eager")


def projected_heads(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
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
