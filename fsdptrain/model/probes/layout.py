"""Choose the packed or padded layout by testing the model before the first step, on the training device.

The probe computes the logprobs of two segments in each candidate layout and compares them with the stock model (eager
attention, dense masks), one segment at a time. The tolerance is that of the dtype, and at most a quarter of the change
that a full leak causes in this model. The probe then changes the first segment of a pack, which must not change the
logprobs of the second. The shapes stay the same, so rounding does not hide a short leak (a convolution over two
tokens), as it would between two kernels in half precision.

No list of model names decides. Candidates that differ, raise or leak are rejected, and the report gives the reason.

    layout: packed, attention fsdptrain_segments (probe: 1.2e-06 <= 0.0001)
    layout: padded, attention fsdptrain_segments (probe: 3.4e-07 <= 0.0001; packed: ValueError: ...)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.distributed import one_line
from fsdptrain.enabled_features import NO_FEATURES, Features
from fsdptrain.errors import NumericsError
from fsdptrain.model.attention.attention import register_attention, set_attention
from fsdptrain.model.policy import MODEL_ERRORS, TOLERANCES, evaluating, logprobs_or_refusal, over_ranks, plain_batch
from fsdptrain.model.rows import Layout
from fsdptrain.model.structure import stock_class
from fsdptrain.types import Images, Segment

RequestedLayout = Literal["auto", "packed", "padded"]
STOCK = ("sdpa", "eager")  # with dense masks, for models whose own mask our attention would lose
REFERENCE = "eager"  # supported by every model
# Tokens per probe segment. The probe exceeds sliding windows of up to about LONGEST tokens.
SHORT, LONG, LONGEST = 23, 40, 1100
LEAK = 2e-3  # [nats] change of logprobs by other segments that is allowed beyond half-precision noise
LOSES_MASK = {"attention_chunk_size": "its attention is chunked, which no boundary expresses"}  # llama4


@dataclass(frozen=True)
class LayoutProbe:
    """The chosen layout and the measured differences."""

    layout: Layout
    attention: str  # attention implementation that the model is set to
    max_difference: float  # mean difference of logprobs from the stock model, maximum over segments
    tolerance: float
    reason: str = ""  # why preferred candidates were rejected

    @property
    def line(self) -> str:
        """The line of the startup report."""
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
    features: Features = NO_FEATURES,
) -> LayoutProbe:
    """Find the first layout that the policy computes exactly, and set the model to it.

    Call it after `install_policy_forward`. Collective if the model is sharded; every rank returns the same result. The
    order is packed, then padded, both with the attention that the model was built with, then padded with the attention
    of transformers. With a processor of prompts, its sequences must be exact too. Raises NumericsError if
    no candidate that `requested` allows is exact.
    """
    register_attention()
    device = device or platform.local_device()
    trials = [[Segment(ids) for ids in probe_segments(model, vocab_size)]]
    if features.prompt_processor is not None:
        trials.append([*features.prompt_processor.probe_segments(vocab_size)])
    reasons: list[str] = []
    configured = str(model.config._attn_implementation)
    with evaluating(model):
        widest = TOLERANCES[compute_dtype]
        with torch.compiler.set_stance("force_eager"):  # --compile: no graphs for attention that only a probe uses
            references = [_reference(model, segments, widest, device) for segments in trials]
        tolerance = min(widest, *(leak / 4 for _, leak in references))
        for candidate in _candidates(model, requested, configured, reasons):
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


def probe_segments(model: PreTrainedModel, vocab_size: int) -> list[list[int]]:
    """Return two segments and a twin of the first.

    The second segment is longer than the sliding window if that takes at most LONGEST tokens.
    """
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
    """Compute the stock logprobs [L] of the first two segments, each alone, and how far a full leak changes the second.

    Raises NumericsError if later tokens change the logprobs of earlier ones: no layout can fix that.
    """
    set_attention(model, REFERENCE)
    first, second = segments[:2]
    found = []
    both = Segment([*first.token_ids, *second.token_ids], _joined_images([first, second]))
    for segment in (first, second, both):
        values, refusal = _score(model, [segment], "padded", device)
        if not refusal and over_ranks(float(not values.isfinite().all())):
            refusal = "its logprobs are not finite"
        if refusal:
            name = stock_class(model).__name__
            raise NumericsError(f"--hf-checkpoint: {name} cannot score a single sequence: {refusal}")
        found.append(values)
    length = len(first.token_ids)
    ahead = over_ranks((found[2][: length - 1] - found[0][:-1]).abs().mean().item())
    if not ahead <= tolerance:
        raise NumericsError(
            f"{stock_class(model).__name__} is not a causal language model: later tokens change a token's "
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
    """Return the largest difference over ranks (inf on an error or a leak), and the error message or ""."""
    first, second, twin = segments
    try:
        set_attention(model, candidate.attention)
    except MODEL_ERRORS as error:  # depends only on the class, so the same on every rank
        return float("inf"), one_line(error)
    values, refusal = _score(model, [first, second], candidate.layout, device)
    changed, other = _score(model, [twin, second], candidate.layout, device)
    if refusal or other:
        return float("inf"), refusal or other
    apart = values.split([len(first.token_ids), len(second.token_ids)])
    differences = [(found - wanted).abs().mean() for found, wanted in zip(apart, reference, strict=True)]
    worst = over_ranks(torch.stack(differences).max().item())
    leak = over_ranks((changed - values)[len(first.token_ids) :].abs().mean().item())
    if not max(worst, leak) <= tolerance:  # also rejects nan
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
    """Return the logprobs [T], and the error message of the first rank that failed or ""."""
    token_ids = [segment.token_ids for segment in segments]
    batch = plain_batch(token_ids, device=device, images=_joined_images(segments))
    return logprobs_or_refusal(model, batch, layout)


def _joined_images(segments: Sequence[Segment]) -> Images | None:
    if all(segment.images is None for segment in segments):
        return None
    from fsdptrain.data.images import join_images

    return join_images([(segment.images, len(segment.token_ids)) for segment in segments])
