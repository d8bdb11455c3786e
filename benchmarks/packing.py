"""Time, fill and balance of the packer, from a thousand to a million sequences, beside first-fit and Karmarkar-Karp.

    python benchmarks/packing.py             # about a minute on a quiet core
    python benchmarks/packing.py --quick     # seconds

ours            data/packing.py: best-fit decreasing, then even costs over the packs or equal ones in each round
first-fit       decreasing, in Python too, over a tree of free rooms; packs are dealt to ranks as they come
karmarkar-karp  what verl and slime balance with: largest differences over ranks and micro-batches, without a budget of
                tokens, so that fill has no meaning and `over` says how far its largest pack is above the budget

Imbalance is the share of time that ranks wait for the slowest, if time is linear plus quadratic cost and ranks meet
after each pack. Above --peers sequences the peers are left out. `growth` compares the time
of ten times as many sequences with n log n.
"""

import argparse
import heapq
import itertools
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import header, write

from fsdptrain.data.packing import deal_packs, plan_packs, sequence_costs

Packs = list[list[int]]
DISTRIBUTIONS: dict[str, Callable[[random.Random, int], int]] = {
    "lognormal": lambda draw, longest: min(longest, max(20, int(draw.lognormvariate(6.5, 0.8)))),
    "uniform": lambda draw, longest: draw.randint(1, longest),
    "two lengths": lambda draw, longest: draw.choice([longest // 20, longest * 2 // 3]),
}


def first_fit(lengths: list[int], num_ranks: int, max_tokens: int) -> Packs:
    """First-fit decreasing, by a tree of the largest room under each node: O(n log n)."""
    size = 1 << max(1, len(lengths) - 1).bit_length()
    tree = [max_tokens] * (2 * size)
    packs: Packs = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        node = 1
        while node < size:
            node = 2 * node if tree[2 * node] >= lengths[index] else 2 * node + 1
        if node - size == len(packs):
            packs.append([])
        packs[node - size].append(index)
        tree[node] -= lengths[index]
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
    return packs + [[] for _ in range(-len(packs) % num_ranks)]


def karmarkar_karp(costs: list[float], num_packs: int) -> Packs:
    """Largest differencing: the two partial partitions of widest spread are joined, light parts to heavy ones."""
    order = itertools.count()
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for index, cost in enumerate(costs):
        parts = [(cost, [index]), *((0.0, []) for _ in range(num_packs - 1))]
        heap.append((-cost, next(order), parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], next(order), joined))
    return [members for _, members in heap[0][2]]


def timed(run: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """The result, and the least CPU time: what others do on the machine only adds."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        found = run()
        seconds.append(time.process_time() - start)
    return found, min(seconds)


def measure(name: str, count: int, num_ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    draw, budget = random.Random(options.seed), options.max_tokens
    lengths = [DISTRIBUTIONS[name](draw, budget) for _ in range(count)]
    costs = sequence_costs(lengths)

    def dealt(packs: Packs) -> dict[str, float]:
        pack_costs = [math.fsum(costs[i] for i in pack) for pack in packs]
        plan = deal_packs(packs, pack_costs, num_tokens=sum(lengths), num_ranks=num_ranks, max_tokens=budget)
        most = max(sum(lengths[i] for i in pack) for pack in packs)
        return {"fill": round(plan.fill, 4), "imbalance": round(plan.imbalance, 5), "over": max(0, most - budget)}

    repeats = options.repeats if count < 10**6 else min(2, options.repeats)
    plan, seconds = timed(lambda: plan_packs(lengths, num_ranks=num_ranks, max_tokens=budget), repeats)
    row: dict[str, Any] = {"lengths": name, "sequences": count, "ranks": num_ranks, "packs": plan.num_packs * num_ranks}
    # What full packs could reach at best: a rank more than the tokens need has room to spare.
    row["best_fill"] = round(sum(lengths) / budget / (-(-math.ceil(sum(lengths) / budget) // num_ranks) * num_ranks), 4)
    row["ours"] = {"s": round(seconds, 4), "fill": round(plan.fill, 4), "imbalance": round(plan.imbalance, 5)}
    if count <= options.peers:
        packs, seconds = timed(lambda: first_fit(lengths, num_ranks, budget), 1)
        row["first-fit"] = {"s": round(seconds, 4), **dealt(packs)}
    if count * row["packs"] <= 100 * options.peers:  # memory and time of the product
        packs, seconds = timed(lambda: karmarkar_karp(costs, row["packs"]), 1)
        row["karmarkar-karp"] = {"s": round(seconds, 4), **dealt(packs)}
    return row


def growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Time at ten times the number, over ten times the time and the growth of the logarithm: 1 is n log n."""
    found = []
    for a, b in itertools.pairwise(rows):
        if (a["lengths"], a["ranks"]) == (b["lengths"], b["ranks"]):
            ideal = b["sequences"] * math.log(b["sequences"]) / (a["sequences"] * math.log(a["sequences"]))
            ratio = b["ours"]["s"] / max(a["ours"]["s"], 1e-6) / ideal
            found.append({"lengths": a["lengths"], "ranks": a["ranks"], "to": b["sequences"], "ratio": round(ratio, 2)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true")
    add("--json", type=Path, help="write the report to this file")
    add("--sequences", nargs="+", type=int, default=[10**3, 10**4, 10**5, 10**6])
    add("--ranks", nargs="+", type=int, default=[8, 64, 1024])
    add("--max-tokens", type=int, default=8192)
    add("--peers", type=int, default=10**5, help="most sequences for the peers")
    add("--repeats", type=int, default=3)
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.quick:
        options.sequences, options.ranks, options.repeats = [10**3, 10**4], [8], 1
    begin, rows = header(), []
    for name in DISTRIBUTIONS:
        for num_ranks in options.ranks:
            for count in options.sequences:
                rows.append(measure(name, count, num_ranks, options))
                print(json.dumps(rows[-1]))
    report = {
        **begin,
        "growth": growth(rows),
        "results": rows,
    }
    write(options.json, report)


if __name__ == "__main__":
    main()
