"""From logits to a token: one uniform number for each token, through the inverse of the distribution function.

The number depends on nothing but (seed, prompt, index of the sample, position). So a completion does not depend on the
rank, the batch or the order in which it was made, but for the rounding of the logits. Inverting the distribution
function needs one number for each token, where Gumbel noise needs one for each entry of the vocabulary.
"""

import hashlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 128  # entries whose running sum is one row of a matrix product
_MAX_ELEMENTS = 2**25  # logits that are sampled at one time: 128 MiB for each float32 copy of them


def uniform_stream(seed: int, prompt_id: str, sample_index: int, count: int) -> np.ndarray:
    """The first `count` numbers in [0, 1) of the stream that belongs to one completion. (count,) f64

    Philox, a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by a
    hash of the completion's name: the same on every machine, and longer streams only append.
    """
    name = f"{seed}/{sample_index}/{prompt_id}"
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def sample(logits: Tensor, uniforms: Tensor, *, temperature: float, top_p: float, top_k: int) -> tuple[Tensor, Tensor]:
    """A token for each row of `logits` [R, V], and its log-probability: [R] i64 and [R] f32.

    The log-probability is that of the distribution which was sampled from: after temperature, renormalised over what
    top_k and top_p leave. At temperature 0 the token is the most likely one, and its log-probability that of the
    softmax at temperature 1. `uniforms` [R] f64 lie in [0, 1).
    """
    rows = max(1, _MAX_ELEMENTS // logits.shape[-1])
    parts = [
        _sample_rows(part, draws, temperature, top_p, top_k)
        for part, draws in zip(logits.split(rows), uniforms.split(rows), strict=True)
    ]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _sample_rows(
    logits: Tensor, uniforms: Tensor, temperature: float, top_p: float, top_k: int
) -> tuple[Tensor, Tensor]:
    scaled = logits.float()
    if temperature > 0.0:
        scaled = restrict(scaled / temperature if temperature != 1.0 else scaled, top_p=top_p, top_k=top_k)
    shifted = scaled - scaled.amax(-1, keepdim=True)
    weights = shifted.exp()  # the softmax but for its denominator, which the draw does not need: one pass less
    tokens = inverse_cdf(weights, uniforms) if temperature > 0.0 else shifted.argmax(-1)
    return tokens, shifted.gather(-1, tokens[:, None]).squeeze(-1) - weights.sum(-1).log()


def restrict(logits: Tensor, *, top_p: float, top_k: int) -> Tensor:
    """`logits` [R, V] with -inf where top_k and then top_p exclude. Ties with the last token of top_k stay."""
    if top_k > 0:
        smallest = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1, dtype=torch.float64)
        mass_before = running_sums(probs) - probs
        excluded = mass_before >= top_p
        excluded[:, 0] = False  # the most likely token always stays
        logits = logits.masked_fill(torch.empty_like(excluded).scatter_(-1, order, excluded), -torch.inf)
    return logits


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The token whose interval of the running sum of `weights` [R, V] f32 holds `uniforms` [R] f64: [R] i64.

    A token's chance is its share of the sum of its row.

    In two levels: first the block of entries, then the entry in it. Running sums are float64; only the sum of one
    block is float32, as exact as `weights` themselves (float64 there takes ten times as long on a CPU). A token of
    weight zero is never drawn.
    """
    num_rows, vocab_size = weights.shape
    blocks = F.pad(weights, (0, -vocab_size % _BLOCK)).view(num_rows, -1, _BLOCK)
    row = torch.arange(num_rows, device=weights.device)

    ends = running_sums(blocks.sum(-1).double())  # [R, V / _BLOCK]
    target = _below(uniforms * ends[:, -1], ends[:, -1])
    block = (ends <= target[:, None]).sum(-1)
    start = torch.where(block > 0, ends[row, block - 1], 0.0)

    ends = running_sums(blocks[row, block].double())  # [R, _BLOCK]
    target = _below((target - start).clamp(min=0.0), ends[:, -1])
    return block * _BLOCK + (ends <= target[:, None]).sum(-1)


def running_sums(values: Tensor) -> Tensor:
    """Inclusive sums along the last dimension of `values` [R, N] f64.

    A product with a triangle of ones, in blocks: torch.cumsum has no deterministic kernel for floats on CUDA, and
    raises under --deterministic-mode.
    """
    num_rows, length = values.shape
    size = min(length, _BLOCK)
    triangle = values.new_ones(size, size).triu()
    if length <= _BLOCK:
        return values @ triangle
    blocks = F.pad(values, (0, -length % _BLOCK)).view(num_rows, -1, _BLOCK) @ triangle
    ends = running_sums(blocks[:, :, -1])
    blocks[:, 1:] += ends[:, :-1, None]
    return blocks.view(num_rows, -1)[:, :length]


def _below(target: Tensor, limit: Tensor) -> Tensor:
    """`target`, but under `limit`, which rounding may have reached."""
    return torch.minimum(target, torch.nextafter(limit, torch.zeros_like(limit)))
