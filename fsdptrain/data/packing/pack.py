"""Which samples share a pack, and what a pack looks like.

`plan_packs` looks at lengths only, so every rank computes the same plan from the same lengths. `pack` makes the
tensors, and is the only place where tokens and what is said of them are shifted against each other.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdptrain.algo.weights import Totals, num_loss_tokens, token_weight
from fsdptrain.data.routes import join_routes
from fsdptrain.errors import ConfigError
from fsdptrain.features.prefix_sharing.detect import share_prefixes
from fsdptrain.types import Images, PackedBatch, Sample, join_images, positions_of

# Cost of a sequence of L tokens in units of a token's linear work: L + QUADRATIC_COST * L^2. A transformer layer of
# width h does 24 h^2 operations for a token's matrices and, causal, 2 L h for its attention: 1 / (12 h), here with h =
# 2048.
QUADRATIC_COST = 1 / (12 * 2048)
MANY_PACKS = 100  # of a rank, from which on it waits for a hundredth of the time at most, however packs were filled
NO_IMAGES: Mapping[str, Images] = MappingProxyType({})


@dataclass(frozen=True)
class PackPlan:
    """Which samples go where, each into one pack. Packs of a rank run from the costliest to the cheapest."""

    packs: tuple[tuple[tuple[int, ...], ...], ...]  # [rank][pack] -> indices of samples; the same number for each rank
    fill: float  # tokens / (max_tokens x packs of all ranks), in [0, 1]
    imbalance: float  # share of time that ranks wait for the slowest, if time is cost and ranks meet after each pack
    cost: float  # time of the slowest ranks, pack by pack, in units of a token's linear work
    shared: float = 0.0  # share of the tokens that are computed with those of another sample, in [0, 1)

    @property
    def num_packs(self) -> int:
        """Packs of each rank, at least 1."""
        return len(self.packs[0])


def plan_packs(
    lengths: Sequence[int], *, num_ranks: int, max_tokens: int, quadratic_cost: float = QUADRATIC_COST
) -> PackPlan:
    """As few packs as best-fit decreasing needs, the same number on each rank, balanced by linear plus quadratic cost.

    Raises ConfigError if a sample is longer than `max_tokens`.
    """
    check_lengths(lengths, max_tokens=max_tokens)
    costs = sequence_costs(lengths, quadratic_cost)
    packs = fill_packs(lengths, costs, num_ranks=num_ranks, max_tokens=max_tokens)
    pack_costs = [math.fsum(costs[index] for index in pack) for pack in packs]
    return deal_packs(packs, pack_costs, num_tokens=sum(lengths), num_ranks=num_ranks, max_tokens=max_tokens)


def sequence_costs(lengths: Sequence[int], quadratic_cost: float = QUADRATIC_COST) -> list[float]:
    return [length + quadratic_cost * length * length for length in lengths]


def fill_packs(sizes: Sequence[int], costs: Sequence[float], *, num_ranks: int, max_tokens: int) -> list[list[int]]:
    """Which items go into each pack; the ranks divide the number of packs. No item may be larger than `max_tokens`.

    Best-fit decreasing shares first-fit decreasing's bound of 11/9 of the optimum, and needs no tree. The budget is
    hard. Once the number of packs is known, items are spread evenly over them (the costliest to the cheapest pack so
    far); where packs are too full for that, the best-fit packs stay and only their ranks are balanced. So too where a
    rank has many: see `deal_packs`. O(n log n) comparisons.
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


def plan_rows(
    lengths: Sequence[int], *, num_ranks: int, max_tokens: int, quadratic_cost: float = QUADRATIC_COST
) -> PackPlan:
    """The plan for the padded layout, where a pack computes (samples x longest) tokens: that product keeps the budget.

    Samples of like length share a pack. So that every rank has as many packs, the costliest are halved, rather than
    that some ranks get none.
    """
    check_lengths(lengths, max_tokens=max_tokens)
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    packs: list[list[int]] = []
    for index in longest_first:
        if not packs or (len(packs[-1]) + 1) * lengths[packs[-1][0]] > max_tokens:
            packs.append([])
        packs[-1].append(index)

    def cost(pack: list[int]) -> float:
        longest = lengths[pack[0]] if pack else 0
        return len(pack) * (longest + quadratic_cost * longest * longest)

    while len(packs) % num_ranks:
        costliest = max(range(len(packs)), key=lambda number: (len(packs[number]) > 1, cost(packs[number])))
        half = -(-len(packs[costliest]) // 2)
        packs[costliest], rest = packs[costliest][:half], packs[costliest][half:]
        packs.append(rest)
    packs = packs or [[] for _ in range(num_ranks)]
    costs = [cost(pack) for pack in packs]
    return deal_packs(packs, costs, num_tokens=sum(lengths), num_ranks=num_ranks, max_tokens=max_tokens)


def deal_packs(
    packs: Sequence[Sequence[int]],
    pack_costs: Sequence[float],
    *,
    num_tokens: int,  # that are computed
    num_ranks: int,
    max_tokens: int,
) -> PackPlan:
    """Packs, whose number the ranks divide, by rank: those of like cost run at the same time.

    In one round no rank waits longer than the costliest and the cheapest pack of it differ. Over all rounds these
    differences add up to that of the costliest and the cheapest pack of all: one pack in as many as a rank has.
    """
    by_rank = _deal(pack_costs, num_ranks)
    num_packs = len(by_rank[0])
    slowest = sum(max(pack_costs[row[k]] for row in by_rank) for k in range(num_packs))
    return PackPlan(
        packs=tuple(tuple(tuple(packs[pack]) for pack in row) for row in by_rank),
        fill=num_tokens / (num_ranks * num_packs * max_tokens),
        imbalance=max(0.0, 1 - sum(pack_costs) / (num_ranks * slowest)) if slowest else 0.0,
        cost=slowest,
    )


def check_lengths(lengths: Sequence[int], *, max_tokens: int) -> None:
    """Raises ConfigError for a sample that cannot fit into any pack."""
    if lengths and max(lengths) > max_tokens:
        raise ConfigError(
            f"--max-tokens-per-gpu (times --context-parallel-size) {max_tokens} is less than a sample of "
            f"{max(lengths)} tokens, and samples are never split: raise it, lower --rollout-max-prompt-len or "
            "--rollout-max-response-len, or leave such samples out by --overlong drop"
        )


def drop_overlong(samples: Sequence[Sample], *, max_tokens: int, overlong: str) -> tuple[list[Sample], int]:
    """The samples that fit into a pack, and how many were dropped; ConfigError if none must be (`error`)."""
    fitting = [sample for sample in samples if len(sample.token_ids) <= max_tokens]
    if overlong == "error":
        check_lengths([len(sample.token_ids) for sample in samples], max_tokens=max_tokens)
    return fitting, len(samples) - len(fitting)


def pack(
    samples: Sequence[Sample],
    *,
    aggregation: str,
    totals: Totals,
    max_response_len: int,
    pin_memory: bool = False,
    images: Mapping[str, Images] = NO_IMAGES,
    sharing: bool = False,
) -> PackedBatch:
    """One row of whole samples, on the CPU. `totals` are those of the whole optimizer step over every rank.

    Position t of a segment holds token t with its routes, and everything that is said of token t + 1 (label, mask,
    weight, advantage, rollout logprob): this is the one shift of the program. Pinned memory lets `PackedBatch.to` copy
    without waiting. `images` are those of prompts, by the groups that answer them. sharing: samples in a row that have
    the same prompt are to be computed with one.
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
    batch = PackedBatch(
        input_ids=token_ids,
        labels=of_next_token(token_ids),
        position_ids=torch.arange(len(token_ids)) - boundaries[:-1].repeat_interleave(seqlens),
        cu_seqlens=boundaries.to(torch.int32),
        seqlens=tuple(seqlens.tolist()),
        loss_mask=loss_mask,
        loss_positions=loss_positions,
        loss_places=loss_positions.numpy(),
        loss_weights=per_token(weight(sample) for sample in samples),
        advantages=per_token(sample.advantage for sample in samples),
        rollout_logprobs=of_next_token(_column([sample.rollout_logprobs for sample in samples], torch.float32)),
        num_loss_tokens=totals.num_tokens,
        routes=join_routes(samples),
        images=join_images([(images.get(sample.group_id), len(sample.token_ids)) for sample in samples]),
        shared=share_prefixes(samples) if sharing else None,
    )
    return batch.pin_memory() if pin_memory else batch


def empty_pack(totals: Totals, *, pin_memory: bool = False) -> PackedBatch:
    """One token of weight zero: for a rank without work, so that it takes part in every collective."""
    nothing = Sample("", [0], [False], [0.0])
    return pack([nothing], aggregation="token_mean", totals=totals, max_response_len=1, pin_memory=pin_memory)


def _column(parts: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """[T]. By numpy, which reads a list of numbers five times as fast as torch does."""
    return torch.from_numpy(np.concatenate([np.array(part) for part in parts])).to(dtype)


def _best_fit_decreasing(sizes: Sequence[int], largest_first: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Each item goes to the pack that it fills best, else opens one. `rooms`: the different free rooms, sorted.

    Items of one size go together, as many as a pack takes: what is left of a room is the smallest that there is, so the
    next item of the size goes there too.
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
    """Each item to the cheapest pack so far that has room; None where packs are too full for it."""
    packs: list[list[int]] = [[] for _ in range(num_bins)]
    rooms = [max_tokens] * num_bins
    cheapest = [(0.0, number) for number in range(num_bins)]
    heapify(cheapest)
    tries = 4 * len(sizes)  # bounds the search for room, and so the whole, to O(n log n)
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


def _deal(pack_costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Packs by rank. Like costs run at the same time; in each round the costliest goes to the rank with least."""
    costliest_first = sorted(range(len(pack_costs)), key=pack_costs.__getitem__, reverse=True)
    by_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for start in range(0, len(pack_costs), num_ranks):
        least_first = sorted(range(num_ranks), key=totals.__getitem__)
        for rank, number in zip(least_first, costliest_first[start : start + num_ranks], strict=True):
            by_rank[rank].append(number)
            totals[rank] += pack_costs[number]
    return by_rank
