"""Packing: assignment of samples to packs and construction of pack tensors.

`plan_packs` depends only on lengths, so every rank computes the same plan. `pack` builds the tensors, and is the only
place where per-token values are shifted relative to tokens.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace
from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdptrain.algo.weights import Totals, num_loss_tokens, token_weight
from fsdptrain.errors import ConfigError
from fsdptrain.types import Images, PackedBatch, Sample, positions_of

# Cost of a sequence of L tokens, in units of a token's linear cost: L + QUADRATIC_COST * L^2. Per token, a transformer
# layer of width h takes 24 h^2 operations for its matrices and 2 L h for causal attention: the ratio is 1 / (12 h) per
# L, here with h = 2048.
QUADRATIC_COST = 1 / (12 * 2048)
MANY_PACKS = 100  # packs per rank from which idle time is at most 1/100, regardless of how packs are filled
NO_IMAGES: Mapping[str, Images] = MappingProxyType({})


@dataclass(frozen=True)
class PackPlan:
    """Assignment of samples to packs and ranks. The packs of a rank are sorted by decreasing cost."""

    packs: tuple[tuple[tuple[int, ...], ...], ...]  # [rank][pack] -> sample indices; as many packs, 1 or more, per rank
    fill: float  # tokens / (max_tokens x packs of all ranks), in [0, 1]
    imbalance: float  # share of time ranks wait for the slowest, if time is cost and ranks synchronize after each pack
    cost: float  # cost of the slowest rank, summed over rounds, in units of a token's linear cost
    shared: float = 0.0  # share of tokens computed only once together with another sample, in [0, 1)
    finish: Callable[[PackedBatch, Sequence[Sample]], PackedBatch] | None = None  # changes a pack before it is pinned


def plan_packs(
    lengths: Sequence[int], *, num_ranks: int, max_tokens: int, quadratic_cost: float = QUADRATIC_COST
) -> PackPlan:
    """Plan packs by best-fit decreasing: few packs, the same number per rank, balanced by linear plus quadratic cost.

    Raises ConfigError if a sample is longer than `max_tokens`.
    """
    check_lengths(lengths, max_tokens=max_tokens)
    costs = sequence_costs(lengths, quadratic_cost)
    packs = fill_packs(lengths, costs, num_ranks=num_ranks, max_tokens=max_tokens)
    pack_costs = [math.fsum(costs[index] for index in pack) for pack in packs]
    return assign_packs_to_ranks(packs, pack_costs, num_tokens=sum(lengths), num_ranks=num_ranks, max_tokens=max_tokens)


def sequence_costs(lengths: Sequence[int], quadratic_cost: float = QUADRATIC_COST) -> list[float]:
    return [length + quadratic_cost * length * length for length in lengths]


def fill_packs(sizes: Sequence[int], costs: Sequence[float], *, num_ranks: int, max_tokens: int) -> list[list[int]]:
    """Assign items to packs. Returns a multiple of `num_ranks` packs. No item may be larger than `max_tokens`.

    Best-fit decreasing has the same bound as first-fit decreasing, 11/9 of the optimum, and needs no tree. The token
    budget is hard. Once the number of packs is known, items are spread evenly: in order of decreasing size, each goes
    to the currently cheapest pack. If packs are too full for that, or a rank has many packs (see
    `assign_packs_to_ranks`), the best-fit packs are kept and only the ranks are balanced. O(n log n) comparisons.
    """
    largest_first = np.argsort(-np.asarray(sizes, dtype=np.int64), kind="stable").tolist()  # ties by index
    packs = _best_fit_decreasing(sizes, largest_first, max_tokens)
    num_packs = max(1, -(-len(packs) // num_ranks))
    if num_packs < MANY_PACKS:
        num_bins = num_packs * num_ranks
        spread = _spread(sizes, costs, largest_first, num_bins=num_bins, max_tokens=max_tokens)
        if spread is not None:
            return spread
    return packs + [[] for _ in range(num_packs * num_ranks - len(packs))]


def assign_packs_to_ranks(
    packs: Sequence[Sequence[int]],
    pack_costs: Sequence[float],
    *,
    num_tokens: int,  # computed tokens
    num_ranks: int,
    max_tokens: int,
) -> PackPlan:
    """Assign packs to ranks such that packs of similar cost run at the same time.

    The number of packs must be a multiple of `num_ranks`. In each round, a rank waits at most for the cost difference
    between the costliest and the cheapest pack of the round. Over all rounds, these differences sum to at most the
    difference between the costliest and the cheapest pack of all: at most one pack, out of all packs of a rank.
    """
    by_rank = _assign(pack_costs, num_ranks)
    num_packs = len(by_rank[0])
    slowest = sum(max(pack_costs[row[k]] for row in by_rank) for k in range(num_packs))
    return PackPlan(
        packs=tuple(tuple(tuple(packs[pack]) for pack in row) for row in by_rank),
        fill=num_tokens / (num_ranks * num_packs * max_tokens),
        imbalance=max(0.0, 1 - sum(pack_costs) / (num_ranks * slowest)) if slowest else 0.0,
        cost=slowest,
    )


def check_lengths(lengths: Sequence[int], *, max_tokens: int) -> None:
    """Raise ConfigError if a sample does not fit into any pack."""
    if lengths and max(lengths) > max_tokens:
        raise ConfigError(
            f"--max-tokens-per-gpu (times --context-parallel-size) {max_tokens} is less than a sample of "
            f"{max(lengths)} tokens, and samples are never split: raise it, lower --rollout-max-prompt-len or "
            "--rollout-max-response-len, or leave such samples out by --overlong-samples drop"
        )


def drop_overlong(samples: Sequence[Sample], *, max_tokens: int, overlong_samples: str) -> tuple[list[Sample], int]:
    """Return the samples that fit into a pack and the number of dropped ones, with their other sequences.

    If `overlong_samples` is "error", raises ConfigError instead of dropping samples.
    """
    if overlong_samples == "error":
        check_lengths([len(s.token_ids) for sample in samples for s in sample.sequences], max_tokens=max_tokens)

    def fits(sample: Sample) -> bool:
        return len(sample.token_ids) <= max_tokens

    fitting = [replace(s, others=tuple(filter(fits, s.others))) if s.others else s for s in samples if fits(s)]
    return fitting, _num_sequences(samples) - _num_sequences(fitting)


def _num_sequences(samples: Sequence[Sample]) -> int:
    return sum(len(sample.sequences) for sample in samples)


def pack(
    samples: Sequence[Sample],
    *,
    aggregation: str,
    totals: Totals,
    max_response_len: int,
    pin_memory: bool = False,
    finish: Callable[[PackedBatch, Sequence[Sample]], PackedBatch] | None = None,
    images: Mapping[str, Images] = NO_IMAGES,
) -> PackedBatch:
    """Pack whole samples into one row on the CPU.

    Position t of a segment holds token t with its routes, and the label, mask, weight, advantage and rollout logprob of
    token t + 1. This is the only place that shifts them.

    Args:
        totals: denominators of the whole optimizer step over all ranks.
        pin_memory: let `PackedBatch.to` copy without blocking.
        finish: `PackPlan.finish`.
        images: images of prompts, by group id.
    """
    if not samples:
        return empty_pack(totals, pin_memory=pin_memory)
    assert all(0 < len(s.token_ids) == len(s.loss_mask) == len(s.rollout_logprobs) for s in samples)
    seqlens = torch.tensor([len(sample.token_ids) for sample in samples])
    boundaries = F.pad(seqlens.cumsum(0), (1, 0))
    last = boundaries[1:] - 1

    def of_next_token(values: Tensor) -> Tensor:
        return values.roll(-1).index_fill_(0, last, 0)

    def per_token(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float32).repeat_interleave(seqlens) * loss_mask

    def weight(sample: Sample) -> float:
        count = num_loss_tokens(sample)
        if not count:
            return 0.0
        return token_weight(aggregation, loss_tokens=count, totals=totals, max_response_len=max_response_len)

    token_ids = _column([sample.token_ids for sample in samples], torch.int64)
    loss_mask = of_next_token(_column([sample.loss_mask for sample in samples], torch.bool))
    loss_positions = positions_of(loss_mask)
    loss_weights = per_token(weight(sample) for sample in samples)
    if any(sample.token_weights for sample in samples):
        token_weights = [sample.token_weights or [1.0] * len(sample.token_ids) for sample in samples]
        loss_weights *= of_next_token(_column(token_weights, torch.float32))
    batch = PackedBatch(
        input_ids=token_ids,
        labels=of_next_token(token_ids),
        position_ids=torch.arange(len(token_ids)) - boundaries[:-1].repeat_interleave(seqlens),
        cu_seqlens=boundaries.to(torch.int32),
        seqlens=tuple(seqlens.tolist()),
        loss_mask=loss_mask,
        loss_positions=loss_positions,
        loss_places=loss_positions.numpy(),
        loss_weights=loss_weights,
        advantages=per_token(sample.advantage for sample in samples),
        rollout_logprobs=of_next_token(_column([sample.rollout_logprobs for sample in samples], torch.float32)),
        num_loss_tokens=totals.num_tokens,
        num_skipped_tokens=totals.num_skipped,
        routes=_routes(samples),
        images=_images(samples, images),
    )
    batch = batch if finish is None else finish(batch, samples)
    return batch.pin_memory() if pin_memory else batch


def empty_pack(totals: Totals, *, pin_memory: bool = False) -> PackedBatch:
    """Return a pack of one token with weight zero, so that a rank without work takes part in every collective."""
    nothing = Sample("", [0], [False], [0.0])
    return pack([nothing], aggregation="token_mean", totals=totals, max_response_len=1, pin_memory=pin_memory)


def _column(parts: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Concatenate to [T]. NumPy converts lists of numbers five times as fast as torch."""
    return torch.from_numpy(np.concatenate([np.array(part) for part in parts])).to(dtype)


def _best_fit_decreasing(sizes: Sequence[int], largest_first: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put each item into the pack with the smallest sufficient room, or open a new pack.

    `rooms` are the distinct free rooms, sorted. Items of equal size are placed together, as many as fit: after the
    first, the remaining room is the smallest one, so the next item of that size would go to the same pack.
    """
    packs: list[list[int]] = []
    rooms: list[int] = []
    packs_with_room: dict[int, list[list[int]]] = {}
    start = 0
    while start < len(largest_first):
        size = sizes[largest_first[start]]
        at = bisect_left(rooms, size)
        if at == len(rooms):
            room, pack = max_tokens, []
            packs.append(pack)
        else:
            room = rooms[at]
            pack = packs_with_room[room].pop()
            if not packs_with_room[room]:
                del packs_with_room[room], rooms[at]
        stop = min(start + room // size, len(largest_first))
        while sizes[largest_first[stop - 1]] != size:
            stop -= 1
        pack += largest_first[start:stop]
        left = room - size * (stop - start)
        start = stop
        if left not in packs_with_room:
            packs_with_room[left] = []
            insort(rooms, left)
        packs_with_room[left].append(pack)
    return packs


def _spread(
    sizes: Sequence[int], costs: Sequence[float], largest_first: Sequence[int], *, num_bins: int, max_tokens: int
) -> list[list[int]] | None:
    """Put each item into the currently cheapest pack with room. Returns None if packs are too full for it."""
    packs: list[list[int]] = [[] for _ in range(num_bins)]
    rooms = [max_tokens] * num_bins
    cheapest = [(0.0, number) for number in range(num_bins)]
    heapify(cheapest)
    tries = 4 * len(sizes)  # bounds the search for room, and the total, to O(n log n)
    for index in largest_first:
        passed = []
        while cheapest and rooms[cheapest[0][1]] < sizes[index]:
            passed.append(heappop(cheapest))
            tries -= 1
        if not cheapest or tries < 0:
            return None
        cost, number = cheapest[0]
        heapreplace(cheapest, (cost + costs[index], number))
        packs[number].append(index)
        rooms[number] -= sizes[index]
        for entry in passed:
            heappush(cheapest, entry)
    return packs


def _assign(pack_costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Assign packs to ranks in rounds of similar cost. The rank with the least total gets the costliest pack."""
    costliest_first = sorted(range(len(pack_costs)), key=pack_costs.__getitem__, reverse=True)
    by_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for start in range(0, len(pack_costs), num_ranks):
        least_first = sorted(range(num_ranks), key=totals.__getitem__)
        for rank, number in zip(least_first, costliest_first[start : start + num_ranks], strict=True):
            by_rank[rank].append(number)
            totals[rank] += pack_costs[number]
    return by_rank


def _routes(samples: Sequence[Sample]) -> Tensor | None:
    if all(sample.routes is None for sample in samples):
        return None
    from fsdptrain.data.routes import join_routes

    return join_routes(samples)


def _images(samples: Sequence[Sample], images: Mapping[str, Images]) -> Images | None:
    if not images:
        return None
    from fsdptrain.data.images import join_images

    return join_images([(images.get(sample.group_id), len(sample.token_ids)) for sample in samples])
