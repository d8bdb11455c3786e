"""Activation checkpointing: save little of a decoder layer and recompute the rest in the backward pass.

    full        save only the layer input
    selective   save the layer input and the results of matrix products and attention; recompute norms, activations,
                rotary embeddings and casts

Call it before `shard_model`: FSDP hooks wrap the layer's forward, so the layer is gathered during recomputation. The
forward of a layer is replaced, not the layer, so parameter names stay those of the checkpoint. Whether selective
checkpointing works for a model is checked on a small random copy before the model is loaded.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain.errors import ConfigError
from fsdptrain.model.probes.random_copy import guarded_copy
from fsdptrain.model.structure import decoder_layers, tower_layers, vision_parameters

CheckpointingKind = Literal["full", "selective"]

# Operations whose cost per output element grows with the width of the model. Names missing in this torch are skipped.
_DEAR = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_grouped_mm",
    "_scaled_mm",
    "_scaled_grouped_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",  # torch.nn.attention.varlen
)
_DEAR_ELSEWHERE = (
    ("torch_attn", "_varlen_attn"),
    ("flash_attn", "_flash_attn_forward"),
    ("flash_attn", "_flash_attn_varlen_forward"),
    ("flash_attn_3", "fwd"),
)


def dear_operations() -> frozenset[Any]:
    """Return the available operations whose results `selective` saves."""
    names = [("aten", name) for name in _DEAR] + list(_DEAR_ELSEWHERE)
    packets = [getattr(getattr(torch.ops, space), name, None) for space, name in names]
    return frozenset(getattr(p, overload) for p in packets if p is not None for overload in p.overloads())


class Recomputed:
    """A layer forward with activation checkpointing.

    Each forward pass calls `again` for a context, and the recomputation runs inside that context.
    """

    def __init__(self, stock: Callable[..., Any], *, kind: CheckpointingKind) -> None:
        self.again: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._stock = stock
        self._kept = dear_operations() if kind == "selective" else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._stock, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        again = self.again()
        if self._kept is None:
            return nullcontext(), again
        first, second = create_selective_checkpoint_contexts(self._policy)
        return first, _both(second, again)

    def _policy(self, _: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = self._kept is not None and operation in self._kept
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def enable_gradient_checkpointing(model: PreTrainedModel, *, kind: CheckpointingKind = "full") -> None:
    """Recompute all decoder layers, also those of a trained vision tower.

    Gradients are bitwise equal to those without recomputation.
    """
    tower = tower_layers(model) if any(p.requires_grad for p in vision_parameters(model).values()) else []
    for layer in [*decoder_layers(model), *tower]:
        assert not isinstance(layer, FSDPModule), "enable_gradient_checkpointing comes before shard_model"
        layer.forward = Recomputed(layer.forward, kind=kind)


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


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
