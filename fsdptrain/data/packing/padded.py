"""Plan of packs for the padded layout."""

from collections.abc import Sequence

from fsdptrain.data.packing.pack import QUADRATIC_COST, PackPlan, assign_packs_to_ranks, check_lengths


def plan_rows(lengths: Sequence[int], *, num_ranks: int, max_tokens: int) -> PackPlan:
    """Plan packs for the padded layout, where a pack computes samples x longest tokens; the product is the budget.

    Samples of similar length share a pack. To give every rank the same number of packs, the costliest packs are split
    in half, instead of leaving ranks without packs.
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
        return len(pack) * (longest + QUADRATIC_COST * longest * longest)

    while len(packs) % num_ranks:
        costliest = max(range(len(packs)), key=lambda number: (len(packs[number]) > 1, cost(packs[number])))
        half = -(-len(packs[costliest]) // 2)
        packs[costliest], rest = packs[costliest][:half], packs[costliest][half:]
        packs.append(rest)
    packs = packs or [[] for _ in range(num_ranks)]
    costs = [cost(pack) for pack in packs]
    return assign_packs_to_ranks(packs, costs, num_tokens=sum(lengths), num_ranks=num_ranks, max_tokens=max_tokens)
