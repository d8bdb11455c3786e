"""Detection of prefixes that samples of a pack share: the prompt of a group.

Multi-turn samples share the first prompt only. Samples with equal prompt tokens have equal hidden states there, so one
copy is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fsdptrain.data.packing.sample_index import prompt_length
from fsdptrain.types import Sample, tensors_of


@dataclass(frozen=True)
class SharedPrefixes:
    """Prefixes shared by several segments of a pack, each computed once.

    The first segment of each shared prefix is computed in full. The segments directly after it are computed from the
    first differing token on. C <= T tokens are computed. Per-token tensors still have length T; `rows` maps each of the
    T tokens to its computed token.
    """

    segments: tuple[int, ...]  # (N,) index of the segment that holds this segment's prefix; -1: computed in full
    lengths: tuple[int, ...]  # (N,) prefix length [tokens]; 0: none. At least one token of each segment is not shared
    computed: Tensor  # [C] i64, positions of the computed tokens in the pack
    rows: Tensor  # [T] i64, index of the computed token for each token of the pack
    cu_seqlens: Tensor  # [N+1] i32, over the computed tokens

    def map(self, change: Callable[[Tensor], Tensor]) -> SharedPrefixes:
        """Apply `change` to every tensor."""
        return replace(self, **{k: change(v) for k, v in tensors_of(self).items()})

    @property
    def num_tokens(self) -> int:
        """Number of computed tokens."""
        return self.computed.numel()


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
