"""Which tokens the samples of a pack have in common at their beginning: the prompt of a group.

The prompt of a sample is what stands before its first loss token; a conversation shares the first prompt only. Two
samples whose prompts are equal, token by token, have equal hidden states there, so that one of them is enough.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from fsdptrain.types import Sample, SharedPrefixes

NO_PREFIX = (0, 0)


def prompt_length(sample: Sample) -> int:
    """Tokens before the first loss token; 0 where there is none."""
    return sample.loss_mask.index(True) if True in sample.loss_mask else 0


def prompt_key(sample: Sample) -> tuple[int, int]:
    """(63 bits of a hash of the prompt, its length): what plans are made of. Packs compare the tokens."""
    length = prompt_length(sample)
    if not length:
        return NO_PREFIX
    digest = hashlib.blake2b(np.array(sample.token_ids[:length], dtype=np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1, length


def share_prefixes(samples: Sequence[Sample]) -> SharedPrefixes | None:
    """Of samples in a row: each begins like the first of its run, if that has the same prompt. None: nobody shares."""
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
