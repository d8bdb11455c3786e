"""Detection of prefixes that samples of a pack share: the prompt of a group.

The prompt of a sample is everything before its first loss token; multi-turn samples share the first prompt only.
Samples with equal prompt tokens have equal hidden states there, so one copy is computed.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

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
    return SharedPrefixes.of(segments, lengths, [len(sample.token_ids) for sample in samples]) if any(lengths) else None
