"""Packed or padded: the model itself is asked, before the first step, on the device that will train.

Two segments are scored in each candidate layout and compared with the stock model (its own eager attention and masks),
one segment at a time. The tolerance is that of the dtype, but never more than a quarter of what a full leak would do to
this very model. Then the first segment of a pack is changed, which must not move the second: no shape changes, so that
rounding does not hide a short leak (a convolution over two tokens), as it does between two kernels in half precision.
No list of model names decides: what differs, raises or leaks is not used, and the report says why.

    layout: packed, attention fsdptrain_segments (probe: 1.2e-06 <= 0.0001)
    layout: padded, attention fsdptrain_segments (probe: 3.4e-07 <= 0.0001; packed: ValueError: ...)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain import platform
from fsdptrain.distributed import one_line
from fsdptrain.errors import NumericsError
from fsdptrain.features.prefix_sharing.probe import LEAK, PrefixProbe, probe_prefix_gradients, probe_prefixes
from fsdptrain.features.vision.processor import Segment
from fsdptrain.model.attention.attention import register_attention, resolve_attention, set_attention
from fsdptrain.model.inputs import Layout
from fsdptrain.model.policy import (
    MODEL_ERRORS,
    TOLERANCES,
    check_head,
    evaluating,
    install_policy_forward,
    over_ranks,
    plain_batch,
    policy_logprobs,
    score_or_refusal,
)
from fsdptrain.model.probes.random_copy import random_copy
from fsdptrain.model.structure import stock_class
from fsdptrain.types import join_images

RequestedLayout = Literal["auto", "packed", "padded"]
STOCK = ("sdpa", "eager")  # transformers' own, with dense masks: for what has a mask that ours would lose
REFERENCE = "eager"  # every model has it
SHORT, LONG, LONGEST = 23, 40, 1100  # tokens of the probe's segments; a window up to LONGEST is exceeded
LOSES_MASK = {"attention_chunk_size": "its attention is chunked, which no boundary expresses"}  # llama4


@dataclass(frozen=True)
class LayoutProbe:
    """What was chosen and what was measured."""

    layout: Layout
    attention: str  # name of the attention implementation that the model now has
    max_difference: float  # largest over segments of the mean difference of logprobs from the stock model, one by one
    tolerance: float
    reason: str = ""  # why what was preferred is not used
    gradient_difference: float | None = None  # relative to the largest gradient; measured on a random copy only
    prefixes: PrefixProbe | None = None  # None: nobody asked whether they can be shared

    @property
    def line(self) -> str:
        """For the report at start."""
        measured = f"probe: {self.max_difference:.2g} <= {self.tolerance:g}"
        return (
            f"layout: {self.layout}, attention {self.attention} ({measured}{'; ' if self.reason else ''}{self.reason})"
        )


class Candidate(NamedTuple):
    layout: Layout
    attention: str


@torch.no_grad()
def choose_layout(
    model: PreTrainedModel,
    requested: RequestedLayout,
    *,
    vocab_size: int,
    compute_dtype: torch.dtype,
    device: torch.device | None = None,
    shown: Sequence[Segment] = (),
    dealt: bool = False,
) -> LayoutProbe:
    """Find the first layout that the policy computes exactly, and leave the model set to it.

    After `install_policy_forward`. Collective where the model is sharded; every rank comes to the same result. Order:
    packed, then padded, both with the attention that the model was built with, then padded with transformers' own.
    `shown`: three sequences with images, the third a twin of the first; then the layout must be exact for these too.
    `dealt`: tokens are dealt over ranks, which transformers' own attention knows nothing of.
    Raises NumericsError when none is exact, or when `requested` is packed and that is not.
    """
    register_attention()
    device = device or platform.local_device()
    trials = [[Segment(ids) for ids in probe_segments(model, vocab_size)], *([shown] if shown else [])]
    reasons: list[str] = []
    configured = str(model.config._attn_implementation)
    with evaluating(model):
        widest = TOLERANCES[compute_dtype]
        references = [_reference(model, segments, widest, device) for segments in trials]
        tolerance = min(widest, *(leak / 4 for _, leak in references))
        for candidate in _candidates(model, requested, configured, reasons):
            if dealt and candidate.attention in STOCK:
                continue
            tried = [
                _try(model, candidate, segments, reference, tolerance, device)
                for segments, (reference, _) in zip(trials, references, strict=True)
            ]
            difference = max(found for found, _ in tried)
            refusal = next((words for _, words in tried if words), "")
            if difference <= tolerance:
                return LayoutProbe(candidate.layout, candidate.attention, difference, tolerance, "; ".join(reasons))
            reasons.append(
                f"{candidate.layout} with {candidate.attention}: {refusal or f'differs by {difference:.2g}'}"
            )
    raise NumericsError(
        f"--layout {requested}: {stock_class(model).__name__} is not computed exactly (tolerance {tolerance:g}): "
        f"{'; '.join(reasons)}; --layout auto takes what is exact, if anything is"
    )


def probe_random_copy(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> LayoutProbe:
    """The same probe without weights, on the CPU in float32, with the backward pass: `random_copy` of the model.

    Raises NumericsError where no layout is exact, forward and backward, or where the head is not understood.
    """
    try:
        return _probe_copy(random_copy(config, trust_remote_code=trust_remote_code))
    except MODEL_ERRORS:  # a few families tie other parts to the number of layers (gemma3n, gemma4): then all of them
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
            prefixes = _probe_prefixes_of_copy(model, probe)
            return replace(probe, gradient_difference=difference, reason=reason, prefixes=prefixes)
        refused = f"{probe.layout} with {probe.attention}: gradients differ by {difference:.2g}"
    raise NumericsError(f"{type(model).__name__} is not computed exactly backward: {refused}")


def _probe_prefixes_of_copy(model: PreTrainedModel, probe: LayoutProbe) -> PrefixProbe:
    segments = probe_segments(model, model.config.get_text_config().vocab_size)
    chosen: dict[str, Any] = {"layout": probe.layout, "attention": probe.attention, "tolerance": probe.tolerance}
    found = probe_prefixes(model, segments, **chosen, device=torch.device("cpu"))
    return probe_prefix_gradients(model, segments, found, layout=probe.layout)


def probe_segments(model: PreTrainedModel, vocab_size: int) -> list[list[int]]:
    """Two segments and a twin of the first; the second is longer than the sliding window, where that is affordable."""
    values = model.config.get_text_config().to_dict()
    window = values.get("sliding_window")
    longer = LONG if window is None or window + 8 > LONGEST else max(LONG, window + 8)
    longest = values.get("max_position_embeddings") or longer
    generator = torch.Generator().manual_seed(0)
    lengths = (min(SHORT, longest), min(longer, longest), min(SHORT, longest))
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _candidates(
    model: PreTrainedModel, requested: RequestedLayout, configured: str, reasons: list[str]
) -> list[Candidate]:
    values = model.config.get_text_config().to_dict()
    lost = [why for key, why in LOSES_MASK.items() if values.get(key) is not None]
    stock = [Candidate("padded", name) for name in STOCK]
    if lost:
        reasons += [f"{configured}: {why}" for why in lost]
        return [] if requested == "packed" else stock
    packed, padded = Candidate("packed", configured), Candidate("padded", configured)
    return {"auto": [packed, padded, *stock], "packed": [packed], "padded": [padded, *stock]}[requested]


def _reference(
    model: PreTrainedModel, segments: Sequence[Segment], tolerance: float, device: torch.device
) -> tuple[list[Tensor], float]:
    """Logprobs [L] of the first two segments, stock and each alone; and how far a full leak moves the second.

    Raises NumericsError where a token sees what comes after it: no layout would help.
    """
    set_attention(model, REFERENCE)
    first, second = segments[:2]
    found = []
    for segment in (first, second, _in_one(first, second)):
        values, refusal = _score(model, [segment], "padded", device)
        if not refusal and over_ranks(float(not values.isfinite().all())):
            refusal = "its logprobs are not finite"
        if refusal:
            raise NumericsError(f"{stock_class(model).__name__} cannot score one sequence by itself: {refusal}")
        found.append(values)
    length = len(first.token_ids)
    ahead = over_ranks((found[2][: length - 1] - found[0][:-1]).abs().mean().item())
    if not ahead <= tolerance:
        raise NumericsError(
            f"{stock_class(model).__name__} is not a causal language model: what comes after a token moves its "
            f"logprobs by {ahead:.2g} (tolerance {tolerance:g})"
        )
    leak = (found[2][length:] - found[1]).abs().mean().item()
    return found[:2], over_ranks(leak)


def _try(
    model: PreTrainedModel,
    candidate: Candidate,
    segments: Sequence[Segment],
    reference: list[Tensor],
    tolerance: float,
    device: torch.device,
) -> tuple[float, str]:
    """The largest difference of any rank (inf where it refuses or leaks), and the words of that."""
    first, second, twin = segments
    try:
        set_attention(model, candidate.attention)
    except MODEL_ERRORS as error:  # the same on every rank: it looks at the class
        return float("inf"), one_line(error)
    values, refusal = _score(model, [first, second], candidate.layout, device)
    changed, other = _score(model, [twin, second], candidate.layout, device)
    if refusal or other:
        return float("inf"), refusal or other
    apart = values.split([len(first.token_ids), len(second.token_ids)])
    differences = [(found - wanted).abs().mean() for found, wanted in zip(apart, reference, strict=True)]
    worst = over_ranks(torch.stack(differences).max().item())
    leak = over_ranks((changed - values)[len(first.token_ids) :].abs().mean().item())
    if not max(worst, leak) <= tolerance:  # nor where one is nan
        return max(worst, leak) if worst == worst and leak == leak else float("inf"), ""
    if leak > LEAK and candidate.layout == "packed":
        again, _ = _score(model, [first, second], candidate.layout, device)  # kernels may add in any order
        noise = over_ranks((again - values)[len(first.token_ids) :].abs().mean().item())
        if leak > LEAK + 2 * noise:
            return float("inf"), f"one sequence moves the logprobs of another by {leak:.2g}"
    return worst, ""


def _score(
    model: PreTrainedModel, segments: Sequence[Segment], layout: Layout, device: torch.device
) -> tuple[Tensor, str]:
    """Logprobs [T], and the words of the first rank that could not make them."""
    images = [segment.images for segment in segments]
    batch = plain_batch([segment.token_ids for segment in segments], device=device, images=images)
    return score_or_refusal(model, batch, layout)


def _in_one(first: Segment, second: Segment) -> Segment:
    images = join_images([(segment.images, len(segment.token_ids)) for segment in (first, second)])
    return Segment([*first.token_ids, *second.token_ids], images)


def _gradient_difference(model: PreTrainedModel, probe: LayoutProbe) -> float:
    """Largest difference from the gradients of the stock model, one by one, relative to the largest gradient."""
    device = torch.device("cpu")
    first, second, _ = probe_segments(model, model.config.get_text_config().vocab_size)
    set_attention(model, REFERENCE)
    wanted = _gradients(model, [[first], [second]], "padded", device)
    set_attention(model, probe.attention)
    found = _gradients(model, [[first, second]], probe.layout, device)
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted) / largest


def _gradients(
    model: PreTrainedModel, packs: list[list[list[int]]], layout: Layout, device: torch.device
) -> dict[str, Tensor]:
    """Of the sum of all logprobs, position by position with its own weight."""
    for pack in packs:
        batch = plain_batch(pack, device=device)
        values = policy_logprobs(model, batch, layout=layout).values
        (values * (batch.position_ids + 1).sin()).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients
