"""Run the layout probe and a backward pass on a small random copy of a model, from its config alone."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain.errors import NumericsError
from fsdptrain.model.attention.attention import resolve_attention, set_attention
from fsdptrain.model.policy import MODEL_ERRORS, check_head, install_policy_forward, plain_batch, policy_logprobs
from fsdptrain.model.probes.layout import REFERENCE, SHORT, LayoutProbe, choose_layout, probe_segments
from fsdptrain.model.probes.random_copy import random_copy
from fsdptrain.model.rows import Layout
from fsdptrain.types import PackedBatch


def probe_random_copy(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> LayoutProbe:
    """Run the probe and a backward pass on a `random_copy` of the model, on the CPU in float32.

    Raises NumericsError if no layout is exact forward and backward, or if the head is not understood.
    """
    try:
        return _probe_copy(random_copy(config, trust_remote_code=trust_remote_code))
    except MODEL_ERRORS:  # a few families tie other parts to the number of layers (gemma3n, gemma4)
        return _probe_copy(random_copy(config, trust_remote_code=trust_remote_code, all_layers=True))


def _probe_copy(model: PreTrainedModel) -> LayoutProbe:
    install_policy_forward(model, chunk_size=SHORT)
    options: dict[str, Any] = {
        "vocab_size": model.config.get_text_config().vocab_size,
        "compute_dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    set_attention(model, REFERENCE)
    check_head(model, layout="padded", **options)
    refused = ""
    for requested in ("auto", "padded"):
        set_attention(model, resolve_attention("auto", "cpu"))
        probe = choose_layout(model, requested, **options)
        difference = _gradient_difference(model, probe)
        if difference <= probe.tolerance:
            reason = "; ".join(text for text in (refused, probe.reason) if text)
            return replace(probe, gradient_difference=difference, reason=reason)
        refused = f"{probe.layout} with {probe.attention}: gradients differ by {difference:.2g}"
    raise NumericsError(f"{type(model).__name__} is not computed exactly backward: {refused}")


def _gradient_difference(model: PreTrainedModel, probe: LayoutProbe) -> float:
    """Return the difference from the gradients of the stock model, which runs one segment at a time."""
    device = torch.device("cpu")
    first, second, _ = probe_segments(model, model.config.get_text_config().vocab_size)
    set_attention(model, REFERENCE)
    alone = [plain_batch([segment], device=device) for segment in (first, second)]
    wanted = probe_gradients(model, alone, "padded")
    set_attention(model, probe.attention)
    return relative_difference(
        probe_gradients(model, [plain_batch([first, second], device=device)], probe.layout), wanted
    )


def probe_gradients(model: PreTrainedModel, batches: Sequence[PackedBatch], layout: Layout) -> dict[str, Tensor]:
    """Compute the gradients of the sum of all logprobs of `batches`, weighted by position. `model` is unsharded."""
    for batch in batches:
        values = policy_logprobs(model, batch, layout=layout).values
        (values * (batch.position_ids + 1).sin()).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def relative_difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Return the largest difference, relative to the largest element of `wanted`."""
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted) / largest
