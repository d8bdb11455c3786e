"""Test whether samples of one prompt can share its computation, after the layout is chosen.

Three segments with one prefix are computed whole and with a shared prefix; the logprobs must agree. Then the tokens of
the first two segments after the prefix are changed, which must not change the third. A module that carries a state from
token to token without knowledge of prefixes would pass on the state of the wrong segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.data.packing.prefixes import prefix_layout
from fsdptrain.errors import ConfigError
from fsdptrain.model.attention.attention import PACKAGE_ATTENTION
from fsdptrain.model.module_kind import module_kind
from fsdptrain.model.policy import (
    evaluating,
    logprobs_or_refusal,
    over_ranks,
    plain_batch,
)
from fsdptrain.model.probes.layout import LEAK
from fsdptrain.model.rows import Layout
from fsdptrain.types import PackedBatch

OWN = 12  # tokens after the prefix in each probe segment


@dataclass(frozen=True)
class PrefixProbe:
    """Whether prefixes are shared, and the measured differences."""

    shares: bool
    reason: str = ""  # why not
    max_difference: float = 0.0  # mean difference of logprobs from those of whole segments, maximum over segments
    tolerance: float = 0.0

    @property
    def line(self) -> str:
        """The line of the startup report."""
        if self.shares:
            return f"prompts of a group: computed once (probe: {self.max_difference:.2g} <= {self.tolerance:g})"
        return f"prompts of a group: computed for each sample ({self.reason})"


def structural_obstacle(
    model: PreTrainedModel, *, layout: Layout = "packed", attention: str = PACKAGE_ATTENTION[0]
) -> str:
    """Return which part of the model, or of how it is computed, prevents sharing, or "". It may be on meta."""
    if any(module_kind(module) == "recurrent mixer" for module in model.modules()):
        return "its recurrent mixers carry a state through each sequence"
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):  # bfloat16 rounding hides short ones
        return "its convolutions run along each sequence"
    if layout != "packed":
        return "sequences are padded"
    return "" if attention in PACKAGE_ATTENTION else f"{attention} knows no shared prefix"


def require_prefixes(obstacle: str) -> None:
    """Raise ConfigError if there is an obstacle, which must be the same on every rank."""
    if obstacle:
        raise ConfigError(f"--prefix-sharing on: {obstacle}; remove it, and each sample computes its prompt")


@torch.no_grad()
def probe_prefixes(
    model: PreTrainedModel,
    segments: Sequence[Sequence[int]],
    *,
    layout: Layout,
    attention: str,
    tolerance: float,
    device: torch.device | None = None,
) -> PrefixProbe:
    """Test prefix sharing with the layout that `choose_layout` selected. Collective; all ranks return the same result.

    segments: at least two. The first provides the tokens after the prefix; the second is the prefix.
    """
    if obstacle := structural_obstacle(model, layout=layout, attention=attention):
        return PrefixProbe(False, obstacle)
    whole, changed, own = prefix_batches(segments, device or platform.local_device())
    with evaluating(model):
        wanted, _ = logprobs_or_refusal(model, replace(whole, shared=None), layout)
        found, refusal = logprobs_or_refusal(model, whole, layout)
        if refusal:
            return PrefixProbe(False, refusal)
        again, _ = logprobs_or_refusal(model, whole, layout)  # kernels may add in any order
        other, _ = logprobs_or_refusal(model, changed, layout)
    apart = [part[-own:] for part in (found - wanted).abs().split(whole.seqlens)]
    difference = over_ranks(max(part.mean().item() for part in apart))
    moved = over_ranks(_mean(found - other, own))
    if not difference <= tolerance:  # also rejects nan
        return PrefixProbe(False, f"it differs by {difference:.2g}", difference, tolerance)
    if not moved <= min(LEAK, tolerance) + 2 * over_ranks(_mean(found - again, own)):
        return PrefixProbe(False, f"one sequence moves the logprobs of another by {moved:.2g}", difference, tolerance)
    return PrefixProbe(True, "", difference, tolerance)


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


def _mean(differences: Tensor, own: int) -> float:
    return differences[-own:].abs().mean().item()
