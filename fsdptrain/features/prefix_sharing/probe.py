"""May samples of one prompt share its computation? The model itself is asked, as for the layout, and after it.

Three segments with one prefix are scored whole and sharing it, which must agree. Then the tokens of the first two after
the prefix are changed, which must not move the third: what carries a state from token to token, and knows nothing of
prefixes, would hand on that of the wrong segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.errors import ConfigError
from fsdptrain.model.attention.attention import OURS
from fsdptrain.model.inputs import Layout
from fsdptrain.model.policy import evaluating, over_ranks, plain_batch, policy_logprobs, score_or_refusal
from fsdptrain.model.probes.module_tree import module_kind
from fsdptrain.types import PackedBatch, SharedPrefixes

OWN = 12  # tokens of each of the probe's segments behind the prefix
LEAK = 2e-3  # nats that other segments may move the logprobs of one, beyond noise of half precision


@dataclass(frozen=True)
class PrefixProbe:
    """Whether prefixes are shared, and what was measured."""

    shares: bool
    reason: str = ""  # why not
    max_difference: float = 0.0  # largest over segments of the mean difference of logprobs from those computed whole
    tolerance: float = 0.0
    gradient_difference: float | None = None  # relative to the largest gradient; measured on a random copy only

    @property
    def line(self) -> str:
        """For the report at start."""
        if self.shares:
            return f"prompts of a group: computed once (probe: {self.max_difference:.2g} <= {self.tolerance:g})"
        return f"prompts of a group: computed for each sample ({self.reason})"


def structural_obstacle(model: PreTrainedModel) -> str:
    """What the model is made of that cannot share, or ""; a model on meta will do."""
    if any(module_kind(module) == "recurrent mixer" for module in model.modules()):
        return "its recurrent mixers carry a state through each sequence"
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):  # of few tokens: it would hide in bfloat16
        return "its convolutions run along each sequence"
    return ""


def require_prefixes(obstacle: str) -> None:
    """ConfigError where there is one. The same on each rank."""
    if obstacle:
        raise ConfigError(f"--prefix-sharing on: {obstacle}; leave it out, and each sample computes its prompt")


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
    """After `choose_layout`, with what it chose. Collective; every rank comes to the same result.

    segments: at least two; the first gives what follows the prefix, and the second is the prefix.
    """
    obstacle = structural_obstacle(model)
    if not obstacle and layout != "packed":
        obstacle = "sequences are padded"
    if not obstacle and attention not in OURS:
        obstacle = f"{attention} knows no shared prefix"
    if obstacle:
        return PrefixProbe(False, obstacle)
    whole, changed, own = _batches(segments, device or platform.local_device())
    with evaluating(model):
        wanted, _ = score_or_refusal(model, replace(whole, shared=None), layout)
        found, refusal = score_or_refusal(model, whole, layout)
        if refusal:
            return PrefixProbe(False, refusal)
        again, _ = score_or_refusal(model, whole, layout)  # kernels may add in any order
        other, _ = score_or_refusal(model, changed, layout)
    apart = [part[-own:] for part in (found - wanted).abs().split(whole.seqlens)]
    difference = over_ranks(max(part.mean().item() for part in apart))
    moved = over_ranks(_mean(found - other, own))
    if not difference <= tolerance:  # nor where it is nan
        return PrefixProbe(False, f"it differs by {difference:.2g}", difference, tolerance)
    if not moved <= min(LEAK, tolerance) + 2 * over_ranks(_mean(found - again, own)):
        return PrefixProbe(False, f"one sequence moves the logprobs of another by {moved:.2g}", difference, tolerance)
    return PrefixProbe(True, "", difference, tolerance)


def probe_prefix_gradients(
    model: PreTrainedModel, segments: Sequence[Sequence[int]], probe: PrefixProbe, *, layout: Layout
) -> PrefixProbe:
    """`probe` with the difference of gradients: not shared where that is too large. For a whole model on the CPU."""
    if not probe.shares:
        return probe
    batch, _, _ = _batches(segments, torch.device("cpu"))
    wanted, found = (_gradients(model, b, layout) for b in (replace(batch, shared=None), batch))
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    difference = max((found[name] - wanted[name]).abs().max().item() for name in wanted) / largest
    reason = "" if difference <= probe.tolerance else f"gradients differ by {difference:.2g}"
    return replace(probe, shares=not reason, reason=reason, gradient_difference=difference)


def _batches(segments: Sequence[Sequence[int]], device: torch.device) -> tuple[PackedBatch, PackedBatch, int]:
    """Three segments that share a prefix; the same with other tokens behind it in the first two; how many those are.

    What is compared are these few tokens: the prefix is computed alike either way, and in a mean would hide them.
    """
    behind, before = list(segments[0]), list(segments[1])
    own = min(OWN, max(1, len(behind) // 2))
    prefix = before[: max(1, len(before) - own)]
    tails = [behind[:own], behind[own : 2 * own] or behind[:own], behind[::-1][:own]]
    found = []
    for tail in (tails, [tails[2], tails[0], tails[2]]):
        batch = plain_batch([prefix + x for x in tail], device=torch.device("cpu"))
        shared = SharedPrefixes.of((-1, 0, 0), (0, len(prefix), len(prefix)), batch.seqlens)
        found.append(replace(batch, shared=shared).to(device))
    return found[0], found[1], len(tails[0])


def _mean(differences: Tensor, own: int) -> float:
    return differences[-own:].abs().mean().item()


def _gradients(model: PreTrainedModel, batch: PackedBatch, layout: Layout) -> dict[str, Tensor]:
    """Of the sum of all logprobs, each with a weight of its own."""
    values = policy_logprobs(model, batch, layout=layout).values
    weights = torch.arange(1, len(values) + 1).sin()
    (values * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients
