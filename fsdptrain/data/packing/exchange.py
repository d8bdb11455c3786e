"""Exchange of samples between the ranks that generated them and the ranks that train them, over gloo.

Every rank gathers the lengths of all samples (`gather_index`), computes the same plan, and sends each sample to the
rank that needs it. Nothing is pickled: token ids and masks are sent as int32, logprobs and rewards as float64, routes
unchanged, so samples arrive bit-exact. The functions are collective over the default group, whose CPU backend is gloo.

Measured on torch 2.13: gloo's all_to_all_single supports uneven splits on 1, 2 and 4 ranks, so no padding is needed.
"""

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptrain.algo.weights import Totals, count_totals, num_loss_tokens
from fsdptrain.data.packing.prefixes import prompt_key
from fsdptrain.data.routes import join_routes
from fsdptrain.types import Sample


@dataclass(frozen=True)
class SampleIndex:
    """Index of all samples on all ranks, numbered rank by rank in list order. Identical on every rank."""

    lengths: tuple[int, ...]  # tokens of each sample
    loss_tokens: tuple[int, ...]  # loss tokens of each sample
    owners: tuple[int, ...]  # rank that holds each sample
    keys: tuple[int, ...]  # sample keys that do not depend on the location
    prompts: tuple[tuple[int, int], ...]  # (hash, length) of each prompt, from `prefixes.prompt_key`
    route_shape: tuple[int, int] | None = None  # (layers, k), if samples have routes

    def of_rank(self, rank: int) -> range:
        """Return the indices of the samples on `rank`."""
        first = sum(owner < rank for owner in self.owners)
        return range(first, first + self.owners.count(rank))

    def totals(self, indices: Sequence[int]) -> Totals:
        """Return the denominators of an optimizer step that trains these samples."""
        return count_totals([self.loss_tokens[index] for index in indices])


def gather_index(samples: Sequence[Sample]) -> SampleIndex:
    """Gather the planning information of all ranks' samples, with two small collectives."""
    facts = [
        (len(sample.token_ids), num_loss_tokens(sample), key, *prompt_key(sample), *_route_shape(sample))
        for sample, key in zip(samples, sample_keys(samples), strict=True)
    ]
    by_rank = _all_gather_rows(torch.tensor(facts, dtype=torch.int64).reshape(-1, 7))
    rows = torch.cat(by_rank).tolist()
    return SampleIndex(
        lengths=tuple(length for length, *_ in rows),
        loss_tokens=tuple(count for _, count, *_ in rows),
        owners=tuple(rank for rank, held in enumerate(by_rank) for _ in range(len(held))),
        keys=tuple(key for _, _, key, *_ in rows),
        prompts=tuple((prompt, length) for _, _, _, prompt, length, *_ in rows),
        route_shape=next(((layers, k) for *_, layers, k in rows if k), None),
    )


def _route_shape(sample: Sample) -> tuple[int, int]:
    return (0, 0) if sample.routes is None else (sample.routes.shape[1], sample.routes.shape[2])


def sample_keys(samples: Sequence[Sample]) -> list[int]:
    """Return a 63-bit hash of group id and position in the group. A group is on one rank, in a fixed order."""
    places: dict[str, int] = {}
    keys: list[int] = []
    for sample in samples:
        places[sample.group_id] = place = places.get(sample.group_id, -1) + 1
        digest = hashlib.blake2b(f"{place} {sample.group_id}".encode(), digest_size=8).digest()
        keys.append(int.from_bytes(digest) >> 1)
    return keys


def exchange_samples(
    samples: Sequence[Sample], destinations: Sequence[Sequence[int]], *, index: SampleIndex
) -> list[Sample]:
    """Send samples to their destination ranks. Returns this rank's samples, in the order of `destinations`.

    Args:
        samples: the samples that this rank passed to `gather_index`.
        destinations: [rank] -> global indices, each at most once per rank; equal on all ranks.
    """
    assert all(len(set(wanted)) == len(wanted) for wanted in destinations), "a rank gets a sample twice"
    rank, num_ranks = _rank_and_size()
    if num_ranks == 1:
        return [samples[i] for i in destinations[0]]
    first = index.of_rank(rank).start
    outgoing = [[samples[i - first] for i in wanted if index.owners[i] == rank] for wanted in destinations]
    parts = [_encode(batch) for batch in outgoing]
    integers = _all_to_all([part[0] for part in parts])
    floats = _all_to_all([part[1] for part in parts])
    decoded = [_decode(integers[source], floats[source]) for source in range(num_ranks)]
    if index.route_shape is not None:
        routes = _all_to_all([_route_bytes(batch) for batch in outgoing])
        decoded = [_with_routes(*part, index.route_shape) for part in zip(decoded, routes, strict=True)]
    arrived = [iter(batch) for batch in decoded]
    return [next(arrived[index.owners[i]]) for i in destinations[rank]]


def exchange_rows(
    rows: Mapping[int, Tensor],
    wanted: Sequence[Sequence[int]],
    *,
    holders: Mapping[int, int],
    shapes: Sequence[tuple[int, ...]],
) -> list[Tensor]:
    """Send rows to the ranks that need them. Returns this rank's rows, in the order of `wanted`.

    Args:
        rows: number -> float32 tensor, for the rows on this rank.
        wanted: [rank] -> row numbers, repeats allowed; equal on all ranks.
        holders: number -> rank that holds the row; equal on all ranks.
        shapes: shapes of the rows that this rank receives.
    """
    rank, num_ranks = _rank_and_size()
    if num_ranks == 1:
        return [rows[i] for i in wanted[0]]
    parts = [[rows[i].reshape(-1) for i in numbers if holders[i] == rank] for numbers in wanted]
    received = _all_to_all([torch.cat([torch.empty(0), *part]) for part in parts])
    used = [0] * num_ranks
    found: list[Tensor] = []
    for i, shape in zip(wanted[rank], shapes, strict=True):
        start = used[holders[i]]
        used[holders[i]] = end = start + math.prod(shape)
        found.append(received[holders[i]][start:end].reshape(shape))
    return found


def _rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _all_gather_rows(rows: Tensor) -> list[Tensor]:
    """Gather [n, k] from each rank, where n may differ. Padded to the largest n for the transfer."""
    num_ranks = _rank_and_size()[1]
    if num_ranks == 1:
        return [rows]
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
    dist.all_gather(counts, torch.tensor([len(rows)]))
    most = max(int(count) for count in counts)
    padded = rows.new_zeros(most, rows.shape[1])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in range(num_ranks)]
    dist.all_gather(gathered, padded)
    return [part[: int(count)] for part, count in zip(gathered, counts, strict=True)]


def _all_to_all(parts: Sequence[Tensor]) -> list[Tensor]:
    """Send `parts[r]` to rank r. Returns the parts received, by source rank. Sizes may differ."""
    send_sizes = torch.tensor([part.numel() for part in parts])
    receive_sizes = torch.empty_like(send_sizes)
    dist.all_to_all_single(receive_sizes, send_sizes)
    received = parts[0].new_empty(int(receive_sizes.sum()))
    dist.all_to_all_single(received, torch.cat(list(parts)), receive_sizes.tolist(), send_sizes.tolist())
    return list(received.split(receive_sizes.tolist()))


def _route_bytes(samples: Sequence[Sample]) -> Tensor:
    """View routes as bytes, because gloo does not support int16. Samples without routes get NO_ROUTE."""
    routes = join_routes(samples)
    return torch.empty(0, dtype=torch.uint8) if routes is None else routes.flatten().view(torch.uint8)


def _with_routes(samples: Sequence[Sample], sent: Tensor, shape: tuple[int, int]) -> list[Sample]:
    routes = sent.view(torch.int16).view(-1, *shape)
    if not len(routes):
        return list(samples)  # none of these samples has routes
    parts = routes.split([len(sample.token_ids) for sample in samples])
    return [replace(sample, routes=part) for sample, part in zip(samples, parts, strict=True)]


# Integer encoding of a sample: header of seven, token ids, mask, versions if they differ, then its strings in UTF-8,
# each terminated by a zero byte. Float encoding: advantage, reward, rewards in the order of their names, logprobs.
_HEAD = 7


def _encode(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    integers: list[int] = []
    floats: list[float] = []
    for sample in samples:
        strings = "".join(f"{string}\0" for string in (sample.group_id, *sample.rewards)).encode()
        integers += [len(sample.token_ids), len(strings), len(sample.rewards), sample.reward is not None]
        integers += [sample.policy_version, sample.truncated, sample.versions is not None]
        integers += [*sample.token_ids, *sample.loss_mask, *(sample.versions or ()), *strings]
        floats += [sample.advantage, 0.0 if sample.reward is None else sample.reward]
        floats += [*sample.rewards.values(), *sample.rollout_logprobs]
    return torch.tensor(integers, dtype=torch.int32), torch.tensor(floats, dtype=torch.float64)


def _decode(integers: Tensor, floats: Tensor) -> list[Sample]:
    ints, reals = iter(integers.tolist()), iter(floats.tolist())
    samples: list[Sample] = []
    while head := list(itertools.islice(ints, _HEAD)):
        length, string_bytes, num_rewards, scored, policy_version, truncated, has_versions = head
        token_ids = list(itertools.islice(ints, length))
        loss_mask = [bool(m) for m in itertools.islice(ints, length)]
        versions = list(itertools.islice(ints, length)) if has_versions else None
        group_id, *names = bytes(itertools.islice(ints, string_bytes)).decode().split("\0")[:-1]
        advantage, reward = itertools.islice(reals, 2)
        rewards = dict(zip(names, itertools.islice(reals, num_rewards), strict=True))
        samples.append(
            Sample(
                group_id=group_id,
                token_ids=token_ids,
                loss_mask=loss_mask,
                rollout_logprobs=list(itertools.islice(reals, length)),
                reward=reward if scored else None,
                rewards=rewards,
                advantage=advantage,
                policy_version=policy_version,
                versions=versions,
                truncated=bool(truncated),
            )
        )
    return samples
