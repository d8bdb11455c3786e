"""Test whether samples of one prompt can share its computation, after the layout is chosen.

Three segments with one prefix are computed whole and with a shared prefix; the logprobs must agree. Then the tokens of
the first two segments after the prefix are changed, which must not change the third. A module that carries a state from
token to token without knowledge of prefixes would pass on the state of the wrong segment.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.data.packing.prefixes import prefix_layout
from fsdptrain.errors import ConfigError
from fsdptrain.model.attention.attention import PACKAGE_ATTENTION
from fsdptrain.model.layer_kinds import module_kind
from fsdptrain.model.policy import evaluating, logprobs_or_refusal, over_ranks, plain_batch
from fsdptrain.model.probes.layout import LEAK, LayoutProbe
from fsdptrain.types import PackedBatch

OWN = 12  # tokens after the prefix in each probe segment


def require_structure(model: PreTrainedModel) -> None:
    """Raise ConfigError if a part of the model prevents sharing. It may be on meta."""
    if any(module_kind(module) == "recurrent mixer" for module in model.modules()):
        raise _error("its recurrent mixers carry a state through each sequence")
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):  # bfloat16 rounding hides short ones
        raise _error("its convolutions run along each sequence")


@torch.no_grad()
def probe_prefixes(
    model: PreTrainedModel, segments: Sequence[Sequence[int]], probe: LayoutProbe, *, device: torch.device | None = None
) -> float:
    """Test prefix sharing with the layout of `probe`. Raises ConfigError if it is not exact. Collective.

    Returns the mean difference of logprobs from those of whole segments, the maximum over segments.

    segments: at least two. The first provides the tokens after the prefix; the second is the prefix.
    """
    if probe.layout != "packed" or probe.attention not in PACKAGE_ATTENTION:
        raise _error(f"the model is computed in the layout {probe.layout} by {probe.attention}")
    whole, changed, own = prefix_batches(segments, device or platform.local_device())
    with evaluating(model):
        wanted, _ = logprobs_or_refusal(model, replace(whole, shared=None), probe.layout)
        found, refusal = logprobs_or_refusal(model, whole, probe.layout)
        if refusal:
            raise _error(refusal)
        again, _ = logprobs_or_refusal(model, whole, probe.layout)  # kernels may add in any order
        other, _ = logprobs_or_refusal(model, changed, probe.layout)
    apart = [part[-own:] for part in (found - wanted).abs().split(whole.seqlens)]
    difference = over_ranks(max(part.mean().item() for part in apart))
    moved = over_ranks(_mean(found - other, own))
    if not difference <= probe.tolerance:  # also rejects nan
        raise _error(f"it differs by {difference:.2g}")
    if not moved <= min(LEAK, probe.tolerance) + 2 * over_ranks(_mean(found - again, own)):
        raise _error(f"one sequence moves the logprobs of another by {moved:.2g}")
    return difference


def prefix_batches(segments: Sequence[Sequence[int]], device: torch.device) -> tuple[PackedBatch, PackedBatch, int]:
    """Build three segments that share a prefix, a variant with the first two tails changed, and the tail length.

    Only the tails are compared: the prefix is computed the same way in both cases and would dilute the mean.
    """
    behind, before = list(segments[0]), list(segments[1])
    own = min(OWN, max(1, len(behind) // 2))
    prefix = before[: max(1, len(before) - own)]
    tails = [behind[:own], behind[own : 2 * own] or behind[:own], behind[::-1][:own]]
    found = []
    for tail in (tails, [tails[2], tails[0], tails[2]]):
        batch = plain_batch([prefix + x for x in tail], device=torch.device("cpu"))
        shared = prefix_layout((-1, 0, 0), (0, len(prefix), len(prefix)), batch.seqlens)
        found.append(replace(batch, shared=shared).to(device))
    return found[0], found[1], len(tails[0])


def _error(obstacle: str) -> ConfigError:
    return ConfigError(f"--prefix-sharing: {obstacle}; remove it, and each sample computes its prompt")


def _mean(differences: Tensor, own: int) -> float:
    return differences[-own:].abs().mean().item()
