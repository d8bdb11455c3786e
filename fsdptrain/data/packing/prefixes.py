"""Detection of prefixes that samples of a pack share: the prompt of a group.

The prompt of a sample is everything before its first loss token; multi-turn samples share the first prompt only.
Samples with equal prompt tokens have equal hidden states there, so one copy is computed.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from fsdptrain.types import Sample, SharedPrefixes

NO_PREFIX = (0, 0)


def prompt_length(sample: Sample) -> int:
    """Return the number of tokens before the first loss token, or 0 without loss tokens."""
    return sample.loss_mask.index(True) if True in sample.loss_mask else 0


def prompt_key(sample: Sample) -> tuple[int, int]:
    """Return a 63-bit hash of the prompt and its length, for planning. Packs compare the tokens themselves."""
    length = prompt_length(sample)
    if not length:
        return NO_PREFIX
    digest = hashlib.blake2b(np.array(sample.token_ids[:length], dtype=np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1, length


def share_prefixes(samples: Sequence[Sample]) -> SharedPrefixes | None:
    """Find shared prefixes among consecutive samples, relative to the first of each run. None if there are none."""
    segments, lengths = [], []
    first = 0
    for number, sample in enumerate(samples):
        length = prompt_length(sample)
        alike = number > 0 and length > 0 and length == prompt_length(samples[first])
        if alike and sample.token_ids[:length] == samples[first].token_ids[:length]:
            segments.append(first)
            lengths.append(length)
        else:
            first = number
            segments.append(-1)
            lengths.append(0)
    return prefix_layout(segments, lengths, [len(sample.token_ids) for sample in samples]) if any(lengths) else None


def prefix_layout(segments: Sequence[int], lengths: Sequence[int], seqlens: Sequence[int]) -> SharedPrefixes:
    """Compute the layout from prefix owners, prefix lengths and segment lengths, each (N,)."""
    whole, prefix = torch.tensor(seqlens), torch.tensor(lengths)
    own_ends = (whole - prefix).cumsum(0)
    own_starts = own_ends - (whole - prefix)
    starts = (whole.cumsum(0) - whole).repeat_interleave(whole)
    place = torch.arange(len(starts)) - starts  # index of each token in its segment
    is_own = place >= prefix.repeat_interleave(whole)
    from_own = (own_starts - prefix).repeat_interleave(whole) + place
    from_first = own_starts[torch.tensor(segments)].repeat_interleave(whole) + place
    return SharedPrefixes(
        segments=tuple(segments),
        lengths=tuple(lengths),
        computed=is_own.nonzero()[:, 0],
        rows=torch.where(is_own, from_own, from_first),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), own_ends]).to(torch.int32),
    )
