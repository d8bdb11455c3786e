"""The memory of a teacher, from its config.json."""

from functools import cache

import torch
from transformers import AutoConfig

from fsdptrain.config import Config
from fsdptrain.features.distillation.config import CHUNK, SELF, DistillationConfig
from fsdptrain.model.architecture import model_from_config
from fsdptrain.model.loading.hub import resolve_config
from fsdptrain.model.structure import count_parameters, lm_head

_LOGITS = 5  # tensors of one chunk of logits that the divergence and its gradient hold, in float32


def teacher_bytes(config: Config, options: DistillationConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes on the device of a rank, and those on the host of all shards."""
    width, device = getattr(torch, config.compute_dtype_name).itemsize, dict[str, int]()
    trust, is_jsd = config.model.trust_remote_code, options.loss == "jsd"
    if is_jsd:
        _, _, vocab_size = _sizes(config.model.hf_checkpoint, trust)
        device["logits of the divergence"] = _LOGITS * 4 * min(CHUNK, config.model.chunk_size) * vocab_size
    if options.is_server or options.teacher == SELF:
        return device, {}
    assert options.teacher is not None
    total, head, _ = _sizes(options.teacher, trust)
    if is_jsd and options.top_k is None:
        device["the teacher's head"] = width * head
    return device, {"the teacher": width * total}


@cache
def _sizes(checkpoint: str, trust_remote_code: bool) -> tuple[int, int, int]:
    """Return the parameters of all and of the head, and the size of the vocabulary."""
    config = AutoConfig.from_pretrained(resolve_config(checkpoint), trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = model_from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    head = sum(p.numel() for p in lm_head(model).parameters())
    return count_parameters(model).total, head, model.config.get_text_config().vocab_size
