"""Activation checkpointing: keep the input of each decoder layer, compute the rest again in the backward pass.

Call it before `shard_model`: sharding hooks lie around a layer's forward, so that the recomputation finds the layer
gathered. The forward of each layer is replaced, not the layer: the names of parameters stay those of the checkpoint.
"""

from functools import partial

from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from fsdptrain.models.structure import decoder_layers


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Recompute every decoder layer in the backward pass. Gradients are bitwise those without it."""
    for layer in decoder_layers(model):
        assert not isinstance(layer, FSDPModule), "enable_gradient_checkpointing comes before shard_model"
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
