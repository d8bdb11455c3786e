"""Run the layout probe and a backward pass on a small random copy of a model, from its config alone."""

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain.model.attention.attention import resolve_attention, set_attention
from fsdptrain.model.policy import MODEL_ERRORS, install_policy_forward
from fsdptrain.model.probes.head import check_backward, check_head
from fsdptrain.model.probes.layout import REFERENCE, SHORT, LayoutProbe, choose_layout
from fsdptrain.model.probes.random_copy import random_copy


def probe_random_copy(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> LayoutProbe:
    """Run the probe and a backward pass on a `random_copy` of the model, on the CPU in float32.

    Raises NumericsError if no layout is exact, if the head is not understood, or if the model cannot be trained.
    """
    try:
        return _probe_copy(random_copy(config, trust_remote_code=trust_remote_code))
    except MODEL_ERRORS:  # a few families tie other parts to the number of layers (gemma3n, gemma4)
        return _probe_copy(random_copy(config, trust_remote_code=trust_remote_code, all_layers=True))


def _probe_copy(model: PreTrainedModel) -> LayoutProbe:
    install_policy_forward(model, chunk_size=SHORT)
    options: dict[str, Any] = {"vocab_size": model.config.get_text_config().vocab_size, "device": torch.device("cpu")}
    set_attention(model, REFERENCE)
    check_head(model, layout="padded", compute_dtype=torch.float32, **options)
    set_attention(model, resolve_attention("auto", "cpu"))
    probe = choose_layout(model, "auto", compute_dtype=torch.float32, **options)
    check_backward(model, layout=probe.layout, **options)
    return probe
