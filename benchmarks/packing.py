"""Time, fill and balance of the packer, for a thousand to a million sequences, against first-fit and Karmarkar-Karp.

    python benchmarks/packing.py             # some minutes on a quiet core
    python benchmarks/packing.py --quick     # seconds

ours            data/packing/pack.py: best-fit decreasing, then even costs over the packs or equal ones in each round
first-fit       decreasing, also in Python, with a tree of free space; packs go to ranks in order
karmarkar-karp  used for balancing by verl and slime: largest differencing over ranks and micro-batches, without a
                token budget, so fill is undefined and `over` is the excess of its largest pack over the budget

Imbalance is the fraction of time that ranks wait for the slowest, assuming linear plus quadratic cost and a barrier
after each pack. The peers are skipped above --peers sequences. The sides alternate; times are CPU time, and
`times_ours` is the ratio within a round. `growth` compares times with n log n.

The exit code checks these requirements: a million lognormal lengths are packed for 64 ranks within 2 s; for 10,000 or
more of them, on up to 64 ranks, fill is above 97 % and imbalance below 2 %; from 10,000 to a million of any kind, time
grows at most 1.5 times as fast as n log n.
"""

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from record import header, spread, write

from fsdptrain.data.packing.pack import assign_packs_to_ranks, plan_packs, sequence_costs

Packs = list[list[int]]
DISTRIBUTIONS: dict[str, Callable[[random.Random, int], int]] = {
    "lognormal": lambda draw, longest: min(longest, max(20, int(draw.lognormvariate(6.5, 0.8)))),
    "uniform": lambda draw, longest: draw.randint(1, longest),
    "two lengths": lambda draw, longest: draw.choice([longest // 20, longest * 2 // 3]),
}


def first_fit(lengths: list[int], num_ranks: int, max_tokens: int) -> Packs:
    """First-fit decreasing with a tree of the largest free space below each node: O(n log n)."""
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
    """Largest differencing: merge the two partial partitions with the largest spread, light parts with heavy ones."""
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


def in_turns(sides: Mapping[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return the result of each side, and its CPU time in each round. [s]"""
    found: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, run in sides.items():
            start = time.process_time()
            found[side] = run()
            seconds[side].append(time.process_time() - start)
    return found, seconds


def measure(name: str, count: int, num_ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    draw, budget = random.Random(options.seed), options.max_tokens
    lengths = [DISTRIBUTIONS[name](draw, budget) for _ in range(count)]
    costs = sequence_costs(lengths)

    def sharded(packs: Packs) -> dict[str, float]:
        pack_costs = [math.fsum(costs[i] for i in pack) for pack in packs]
        plan = assign_packs_to_ranks(packs, pack_costs, num_tokens=sum(lengths), num_ranks=num_ranks, max_tokens=budget)
        most = max(sum(lengths[i] for i in pack) for pack in packs)
        return {"fill": round(plan.fill, 4), "imbalance": round(plan.imbalance, 5), "over": max(0, most - budget)}

    # Planned once before timing: gives Karmarkar-Karp the number of packs and warms up every side.
    plan = plan_packs(lengths, num_ranks=num_ranks, max_tokens=budget)
    num_packs = plan.num_packs * num_ranks
    sides: dict[str, Callable[[], Any]] = {"ours": lambda: plan_packs(lengths, num_ranks=num_ranks, max_tokens=budget)}
    if count <= options.peers:
        sides["first-fit"] = lambda: first_fit(lengths, num_ranks, budget)
    if count * num_packs <= 100 * options.peers:  # bounds memory and time
        sides["karmarkar-karp"] = lambda: karmarkar_karp(costs, num_packs)
    found, seconds = in_turns(sides, options.rounds)
    # Highest possible fill: rounding up to full rounds of all ranks leaves space unused.
    best = sum(lengths) / budget / (-(-math.ceil(sum(lengths) / budget) // num_ranks) * num_ranks)
    row: dict[str, Any] = {"lengths": name, "sequences": count, "ranks": num_ranks, "packs": num_packs}
    row["best_fill"] = round(best, 4)
    for side, runs in seconds.items():
        row[side] = {"s": round(statistics.median(runs), 4), "runs_s": [round(s, 5) for s in runs]}
        if side == "ours":
            row[side] |= {"fill": round(plan.fill, 4), "imbalance": round(plan.imbalance, 5)}
        else:
            ratios = [other / ours for other, ours in zip(runs, seconds["ours"], strict=True)]
            row[side] |= {**sharded(found[side]), "times_ours": spread(ratios)}
    return row


def growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compute the growth of time from the smallest size of at least 10,000, relative to n log n (1 is n log n).

    Between adjacent sizes it jumps in both directions: from a hundred packs per rank the packer has less to do, and
    lists of a million items exceed the caches.
    """
    found, least = [], {}
    for row in (row for row in rows if row["sequences"] >= 10**4):
        first = least.setdefault((row["lengths"], row["ranks"]), row)
        if first is not row:
            small, large = first["sequences"], row["sequences"]
            ideal = large * math.log(large) / (small * math.log(small))
            ratio = row["ours"]["s"] / max(first["ours"]["s"], 1e-6) / ideal
            found.append({"lengths": row["lengths"], "ranks": row["ranks"], "from": small, "to": large})
            found[-1]["ratio"] = round(ratio, 2)
    return found


def laws_of(rows: list[dict[str, Any]], growths: list[dict[str, Any]]) -> dict[str, bool]:
    """Return which of the requirements above hold, of those that these sizes can test."""
    lognormal = [row for row in rows if row["lengths"] == "lognormal" and row["ranks"] <= 64]
    judged = [row["ours"] for row in lognormal if row["sequences"] >= 10**4]
    million = [row["ours"]["s"] for row in lognormal if (row["sequences"], row["ranks"]) == (10**6, 64)]
    steep = [found["ratio"] for found in growths if found["to"] >= 100 * found["from"]]
    found = {
        "a million on 64 ranks within 2 s": [s < 2 for s in million],
        "fill above 97 %": [ours["fill"] > 0.97 for ours in judged],
        "imbalance below 2 %": [ours["imbalance"] < 0.02 for ours in judged],
        "time grows as n log n": [ratio < 1.5 for ratio in steep],
    }
    return {law: all(held) for law, held in found.items() if held}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true")
    add("--json", type=Path, help="path of the report")
    add("--sequences", nargs="+", type=int, default=[10**3, 10**4, 10**5, 10**6])
    add("--ranks", nargs="+", type=int, default=[8, 64, 1024])
    add("--max-tokens", type=int, default=8192)
    add("--peers", type=int, default=10**5, help="maximum number of sequences for the peers")
    add("--rounds", type=int, default=3)
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.quick:
        options.sequences, options.ranks, options.rounds = [10**3, 10**4], [8], 1
    begin, rows = header(), []
    for name in DISTRIBUTIONS:
        for num_ranks in options.ranks:
            for count in options.sequences:
                rows.append(measure(name, count, num_ranks, options))
                print(json.dumps(rows[-1]))
    growths = growth(rows)
    laws = laws_of(rows, growths)
    print(json.dumps({"growth": growths, "laws": laws}))
    write(options.json, {**begin, "laws": laws, "growth": growths, "results": rows})
    return 0 if all(laws.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
