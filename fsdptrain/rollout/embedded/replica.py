"""An unsharded copy of the model on one device, with weights from the trainer.

It is built on the meta device, so that no memory is allocated or initialized in vain, and returns there to free its
memory for the trainer.
"""

import inspect
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from fsdptrain import platform
from fsdptrain.errors import RolloutError
from fsdptrain.model.loading.files import some_of
from fsdptrain.model.loading.materialize import store_in
from fsdptrain.model.loading.meta import model_from_config

_NEEDED = {"past_key_values", "position_ids", "logits_to_keep"}


def build_replica(checkpoint: Path, *, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """The model of `checkpoint` on the meta device: parameters in `dtype`, buffers in float32 (FSDP's mixed precision).

    RolloutError if its forward does not support the key-value cache of the decode loop.
    """
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    attention = {"attn_implementation": "eager"} if capped else {}  # sdpa of transformers 5.17 ignores the cap
    with torch.device("meta"):
        model = model_from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code, **attention)
    lacking = sorted(_NEEDED.difference(inspect.signature(model.forward).parameters))
    if lacking:
        raise RolloutError(
            f"the embedded engine cannot generate with {type(model).__name__}, whose forward takes no "
            f"{', '.join(lacking)}; use another --rollout-engine"
        )
    store_in(model, dtype)
    return model.requires_grad_(False).eval()


def materialize(model: PreTrainedModel, device: torch.device) -> None:
    """Allocate each tensor of `model` on `device`. Weights are undefined; non-persistent buffers are computed.

    These buffers (rotary frequencies) are in no checkpoint. transformers computes them if all other tensors are marked
    as initialized, as in from_pretrained, and so as in the trainer.
    """
    model.to_empty(device=device)
    model.tie_weights(recompute_mapping=False)  # to_empty has untied the head
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    for module in model.modules():
        # set by the first initialization; later ones would be skipped
        vars(module).pop("_is_hf_initialized", None)
    model.initialize_weights()


def release(model: PreTrainedModel) -> None:
    """Free the memory of all tensors of `model`."""
    model.to_empty(device=torch.device("meta"))
    model.tie_weights(recompute_mapping=False)
    if platform.has_accelerator():
        torch.accelerator.empty_cache()


@torch.no_grad()
def copy_weights(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy `weights` into `model`: every parameter and persistent buffer, by module name.

    A tied tensor may come under any of its names. Reads `weights` to its end even after an error, because iterating it
    is collective. RolloutError names missing, unknown and mismatched tensors.
    """
    targets: dict[str, Tensor] = model.state_dict(keep_vars=True)
    seen: set[int] = set()
    unknown: list[str] = []
    misfits: list[str] = []
    for name, tensor in weights:
        target = targets.get(name)
        if target is None:
            unknown.append(name)
            continue
        seen.add(id(target))
        if target.shape != tensor.shape:
            misfits.append(f"{name} {list(tensor.shape)} for {list(target.shape)}")
        else:
            target.copy_(tensor)
    missing = [name for name, target in targets.items() if id(target) not in seen]
    problems = {"missing": missing, "unknown": unknown, "of another shape": misfits}
    found = "; ".join(f"{len(names)} {kind}: {some_of(names)}" for kind, names in problems.items() if names)
    if found:
        raise RolloutError(
            f"the weights do not fit the rollout model ({found}); trainer and engine must load one model"
        )
