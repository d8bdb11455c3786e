"""Truncated sampling: which tokens top_p, top_k and min_p keep. The engine and the trainer share this function.

The order follows vLLM (Sampler.sample, docs for version 0.19): temperature, then min_p and top_k, then top_p within the
remaining tokens. The kept tokens are always those above a logit threshold, one per row. Ties at the threshold are kept,
so the set does not depend on the order of ties.
"""

import math

import torch
from torch import Tensor

from fsdptrain.model.running_sums import running_sums
from fsdptrain.types import Truncation

_MAX_ELEMENTS = 2**23  # logits sorted at a time: 64 MiB per float64 copy


def smallest_kept(logits: Tensor, truncation: Truncation) -> Tensor:
    """Compute the smallest kept logit of each row of `logits` [R, V], after temperature: [R]. Without gradient.

    min_p keeps tokens at least `min_p` times as likely as the most likely token (arXiv 2407.01082). top_k keeps the k
    most likely tokens. top_p keeps the smallest set of most likely tokens whose probability reaches top_p (arXiv
    1904.09751). At least one token is kept.
    """
    logits = logits.detach()
    smallest = torch.full_like(logits[:, 0], -torch.inf)
    if truncation.min_p > 0.0:
        smallest = logits.amax(-1) + math.log(truncation.min_p)
    if truncation.top_k > 0:
        kth = logits.topk(min(truncation.top_k, logits.shape[-1]), dim=-1).values[:, -1]
        smallest = torch.maximum(smallest, kth)
    if truncation.top_p < 1.0:
        rows = max(1, _MAX_ELEMENTS // logits.shape[-1])
        parts = zip(logits.split(rows), smallest.split(rows), strict=True)
        smallest = torch.cat([_nucleus(part, floor, truncation.top_p) for part, floor in parts])
    return smallest


def _nucleus(logits: Tensor, smallest: Tensor, top_p: float) -> Tensor:
    """Compute the logit of the last token that top_p keeps among the logits >= `smallest` [R]: [R].

    A token is kept while the total probability of all more likely tokens is below top_p.
    """
    ordered = logits.sort(dim=-1, descending=True).values
    left = ordered.masked_fill(ordered < smallest[:, None], -torch.inf)
    probs = left.softmax(-1, dtype=torch.float64)
    mass_before = running_sums(probs) - probs
    last = (mass_before < top_p).sum(-1, keepdim=True).clamp(min=1) - 1
    return torch.maximum(ordered.gather(-1, last)[:, 0], smallest)
