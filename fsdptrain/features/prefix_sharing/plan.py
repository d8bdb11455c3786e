"""Plans in which samples that begin with the same prompt share packs, where that makes the step cheaper.

A prompt is computed once for each pack that its samples are in. So whole families are cheapest, unless there are so few
of them that ranks wait for each other: then it is better to cut them. Several ways to cut are planned; the one whose
slowest ranks are done first is taken.
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from fsdptrain.data.packing.pack import (
    QUADRATIC_COST,
    PackPlan,
    check_lengths,
    deal_packs,
    fill_packs,
    plan_packs,
    sequence_costs,
)

MIN_GAIN = 0.03  # of the cost: sharing itself takes a little time that no cost counts
MIN_PROMPT = 16  # tokens
MOST_SHARED = 4  # times the budget that the samples of a pack may be: attention gathers keys for each of their tokens
_NEARLY_BALANCED = 1.02


def plan_shared(
    lengths: Sequence[int],
    prompts: Sequence[tuple[int, int]],
    *,
    num_ranks: int,
    max_tokens: int,
    quadratic_cost: float = QUADRATIC_COST,
    always: bool = False,
) -> PackPlan:
    """The cheapest plan; that of `plan_packs` where sharing does not make it cheaper by MIN_GAIN.

    In a pack the samples of one prompt stand next to each other. A sample costs what it does there; one
    that shares its first P tokens costs what P tokens would less, for its own tokens look at those too. Of a pack at
    most `max_tokens` are computed, and its samples are MOST_SHARED times as many at most.

    Args:
        prompts: of each sample (what tells its prompt from others, its length); length 0: it has none.
        always: share wherever prompts are equal, at whatever gain.
    """
    check_lengths(lengths, max_tokens=max_tokens)
    families = _families(prompts, shortest=1 if always else MIN_PROMPT)
    limits = {"num_ranks": num_ranks, "max_tokens": max_tokens}
    plain = plan_packs(lengths, quadratic_cost=quadratic_cost, **limits)
    if not families:
        return plain
    samples = _Samples(
        lengths,
        prompts,
        costs=sequence_costs(lengths, quadratic_cost),
        prompt_costs=sequence_costs([length for _, length in prompts], quadratic_cost),
    )
    alone = [[i] for i in sorted(set(range(len(lengths))).difference(*families))]
    ideal = math.fsum(map(samples.cost, [*families, *alone])) / num_ranks
    best: PackPlan | None = None
    parts, most = 1, max(len(family) for family in families)
    while best is None or (best.cost > _NEARLY_BALANCED * ideal and parts < 2 * most):
        units = alone.copy()
        for family in families:
            for part in range(min(parts, len(family))):
                units += _cut(family[part::parts], lengths, prompts[family[0]][1], max_tokens)
        found = _plan(samples, units, {prompts[family[0]] for family in families}, **limits)
        best = found if best is None or found.cost < best.cost else best
        parts *= 2
    return best if always or best.cost < (1 - MIN_GAIN) * plain.cost else plain


@dataclass(frozen=True)
class _Samples:
    """Of one rollout, and what some of them with one prompt, a unit, take in a pack. [tokens]"""

    lengths: Sequence[int]
    prompts: Sequence[tuple[int, int]]
    costs: Sequence[float]
    prompt_costs: Sequence[float]

    def tokens(self, unit: Sequence[int]) -> int:
        """That are computed."""
        return sum(self.lengths[i] for i in unit) - self.prompts[unit[0]][1] * (len(unit) - 1)

    def size(self, unit: Sequence[int]) -> int:
        """Of the budget of a pack."""
        return max(self.tokens(unit), -(-sum(self.lengths[i] for i in unit) // MOST_SHARED))

    def cost(self, unit: Sequence[int]) -> float:
        return math.fsum(self.costs[i] for i in unit) - self.prompt_costs[unit[0]] * (len(unit) - 1)


def _plan(
    samples: _Samples, units: Sequence[list[int]], shared: Set[tuple[int, int]], *, num_ranks: int, max_tokens: int
) -> PackPlan:
    """`units` in packs; those of one of the prompts `shared` that meet in a pack are one there."""
    limits = {"num_ranks": num_ranks, "max_tokens": max_tokens}
    filled = fill_packs([samples.size(u) for u in units], [samples.cost(u) for u in units], **limits)
    packs = [_together([i for unit in pack for i in units[unit]], samples.prompts, shared) for pack in filled]
    num_tokens = sum(samples.tokens(unit) for pack in packs for unit in pack)
    found = deal_packs(
        [[i for unit in pack for i in unit] for pack in packs],
        [math.fsum(map(samples.cost, pack)) for pack in packs],
        num_tokens=num_tokens,
        **limits,
    )
    return replace(found, shared=1 - num_tokens / sum(samples.lengths))


def _families(prompts: Sequence[tuple[int, int]], *, shortest: int) -> list[list[int]]:
    """The samples of each prompt that several have, in the order of their first ones."""
    found: dict[tuple[int, int], list[int]] = {}
    for index, prompt in enumerate(prompts):
        if prompt[1] >= shortest:
            found.setdefault(prompt, []).append(index)
    return [family for family in found.values() if len(family) > 1]


def _cut(family: Sequence[int], lengths: Sequence[int], prompt: int, max_tokens: int) -> list[list[int]]:
    """As few units as the budgets allow, each with the prompt."""
    units: list[list[int]] = []
    room = room_in_all = 0
    for index in sorted(family, key=lengths.__getitem__, reverse=True):
        own = lengths[index] - prompt
        if own > room or lengths[index] > room_in_all:
            units.append([])
            room, room_in_all = max_tokens - prompt, MOST_SHARED * max_tokens
        units[-1].append(index)
        room -= own
        room_in_all -= lengths[index]
    return units


def _together(
    members: Sequence[int], prompts: Sequence[tuple[int, int]], shared: Set[tuple[int, int]]
) -> list[list[int]]:
    """The members of a pack, those of one shared prompt together, any other by itself."""
    found: dict[object, list[int]] = {}
    for index in members:
        found.setdefault(prompts[index] if prompts[index] in shared else index, []).append(index)
    return list(found.values())
