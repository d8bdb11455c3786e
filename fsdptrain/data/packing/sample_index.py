"""The index of all samples of a rollout: what planning needs of them, the same on every rank."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fsdptrain.algo.weights import Totals, count_totals, num_loss_tokens
from fsdptrain.distributed import gather
from fsdptrain.types import Sample


@dataclass(frozen=True)
class SampleIndex:
    """Index of all samples on all ranks, numbered rank by rank in list order. Identical on every rank."""

    lengths: tuple[int, ...]  # tokens of each sample
    loss_tokens: tuple[int, ...]  # loss tokens of each sample
    owners: tuple[int, ...]  # rank that holds each sample
    keys: tuple[int, ...]  # sample keys that do not depend on the location
    prompts: tuple[tuple[int, int], ...]  # (hash, length) of each prompt, from `prompt_key`
    has_advantage: tuple[bool, ...]  # whether the advantage of each sample is not 0
    route_shape: tuple[int, int] | None = None  # (layers, k), if samples have routes

    def totals(self, indices: Sequence[int], packed: Sequence[int]) -> Totals:
        """Return the denominators of an optimizer step over the samples `indices`, of which `packed` are computed."""
        totals = count_totals([self.loss_tokens[index] for index in indices])
        return replace(totals, num_skipped=totals.num_tokens - sum(self.loss_tokens[index] for index in packed))


def gather_index(samples: Sequence[Sample]) -> SampleIndex:
    """Gather the planning information of all ranks' samples, with two small collectives."""
    facts = [
        (
            len(sample.token_ids),
            num_loss_tokens(sample),
            key,
            *prompt_key(sample),
            sample.advantage != 0,
            *((0, 0) if sample.routes is None else sample.routes.shape[1:]),
        )
        for sample, key in zip(samples, sample_keys(samples), strict=True)
    ]
    by_rank = gather(np.array(facts, dtype=np.int64).reshape(-1, 8))
    rows = np.concatenate(by_rank).tolist()
    return SampleIndex(
        lengths=tuple(length for length, *_ in rows),
        loss_tokens=tuple(count for _, count, *_ in rows),
        owners=tuple(rank for rank, held in enumerate(by_rank) for _ in range(len(held))),
        keys=tuple(key for _, _, key, *_ in rows),
        prompts=tuple((prompt, length) for _, _, _, prompt, length, *_ in rows),
        has_advantage=tuple(bool(row[5]) for row in rows),
        route_shape=next(((layers, k) for *_, layers, k in rows if k), None),
    )


def sample_keys(samples: Sequence[Sample]) -> list[int]:
    """Return a 63-bit hash of group id and position in the group. A group is on one rank, in a fixed order."""
    places: dict[str, int] = {}
    keys: list[int] = []
    for sample in samples:
        places[sample.group_id] = place = places.get(sample.group_id, -1) + 1
        digest = hashlib.blake2b(f"{place} {sample.group_id}".encode(), digest_size=8).digest()
        keys.append(int.from_bytes(digest) >> 1)
    return keys


def prompt_length(sample: Sample) -> int:
    """Return the number of tokens before the first loss token, or 0 without loss tokens."""
    return sample.loss_mask.index(True) if True in sample.loss_mask else 0


def prompt_key(sample: Sample) -> tuple[int, int]:
    """Return a 63-bit hash of the prompt and its length, for planning. Packs compare the tokens themselves."""
    length = prompt_length(sample)
    if not length:
        return 0, 0
    digest = hashlib.blake2b(np.array(sample.token_ids[:length], dtype=np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1, length
