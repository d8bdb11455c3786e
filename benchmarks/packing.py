"""Time, fill and balance of the packer, for a thousand to a million sequences, against first-fit.

    python benchmarks/packing.py             # some minutes on a quiet core
    python benchmarks/packing.py --quick     # seconds

ours            data/packing/pack.py: best-fit decreasing, then even costs over the packs or equal ones in each round
first-fit       decreasing, also in Python, with a tree of free space; packs go to ranks in order

Imbalance is the fraction of time that ranks wait for the slowest, assuming linear plus quadratic cost and a barrier
after each pack. First-fit is skipped above --peers sequences. The sides alternate; times are CPU time, and
`times_ours` is the ratio within a round.

The exit code checks these requirements: a million lognormal lengths are packed for 64 ranks within 2 s; for 10,000 or
more of them, on up to 64 ranks, fill is above 97 % and imbalance below 2 %.
"""

import argparse
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
        return {"fill": round(plan.fill, 4), "imbalance": round(plan.imbalance, 5)}

    # Planned once before timing, which warms up
    plan = plan_packs(lengths, num_ranks=num_ranks, max_tokens=budget)
    num_packs = len(plan.packs[0]) * num_ranks
    sides: dict[str, Callable[[], Any]] = {"ours": lambda: plan_packs(lengths, num_ranks=num_ranks, max_tokens=budget)}
    if count <= options.peers:
        sides["first-fit"] = lambda: first_fit(lengths, num_ranks, budget)
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


def laws_of(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Return which of the requirements above hold, of those that these sizes can test."""
    lognormal = [row for row in rows if row["lengths"] == "lognormal" and row["ranks"] <= 64]
    judged = [row["ours"] for row in lognormal if row["sequences"] >= 10**4]
    million = [row["ours"]["s"] for row in lognormal if (row["sequences"], row["ranks"]) == (10**6, 64)]
    found = {
        "a million on 64 ranks within 2 s": [s < 2 for s in million],
        "fill above 97 %": [ours["fill"] > 0.97 for ours in judged],
        "imbalance below 2 %": [ours["imbalance"] < 0.02 for ours in judged],
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
    add("--peers", type=int, default=10**5, help="maximum number of sequences for first-fit")
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
    laws = laws_of(rows)
    print(json.dumps({"laws": laws}))
    write(options.json, {**begin, "laws": laws, "results": rows})
    return 0 if all(laws.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
