"""Test prefix sharing, with gradients, on a small random copy of a model."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain.feature import Features
from fsdptrain.features.prefix_sharing.feature import PrefixSharingFeature
from fsdptrain.features.prefix_sharing.probe import PrefixProbe, prefix_batches, probe_prefixes
from fsdptrain.model.attention.attention import set_attention
from fsdptrain.model.policy import install_policy_forward
from fsdptrain.model.probes.copy_probe import probe_gradients, relative_difference
from fsdptrain.model.probes.layout import LayoutProbe, probe_segments
from fsdptrain.model.probes.random_copy import guarded_copy
from fsdptrain.model.rows import Layout

_CHUNK = 32  # number of tokens whose logits exist at a time


def probe_prefixes_of_copy(
    config: PreTrainedConfig, probe: LayoutProbe, *, trust_remote_code: bool = False
) -> PrefixProbe:
    """Run the probe with gradients on a small random copy of the model. probe: the layout probe of the copy."""
    model = guarded_copy(config, trust_remote_code=trust_remote_code)
    install_policy_forward(model, chunk_size=_CHUNK, features=Features([PrefixSharingFeature()]))
    set_attention(model, probe.attention)
    segments = probe_segments(model, model.config.get_text_config().vocab_size)
    found = probe_prefixes(
        model,
        segments,
        layout=probe.layout,
        attention=probe.attention,
        tolerance=probe.tolerance,
        device=torch.device("cpu"),
    )
    return probe_prefix_gradients(model, segments, found, layout=probe.layout)


def probe_prefix_gradients(
    model: PreTrainedModel, segments: Sequence[Sequence[int]], probe: PrefixProbe, *, layout: Layout
) -> PrefixProbe:
    """Add the gradient difference to `probe`, and disable sharing if it is too large.

    `model` is unsharded and on the CPU.
    """
    if not probe.shares:
        return probe
    batch, _, _ = prefix_batches(segments, torch.device("cpu"))
    wanted, found = (probe_gradients(model, [b], layout) for b in (replace(batch, shared=None), batch))
    difference = relative_difference(found, wanted)
    reason = "" if difference <= probe.tolerance else f"gradients differ by {difference:.2g}"
    return replace(probe, shares=not reason, reason=reason, gradient_difference=difference)
