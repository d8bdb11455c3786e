"""Plan packs in which samples of the same prompt share its computation.

A prompt is computed once per pack that contains its samples. Keeping a whole group together is cheapest, unless there
are so few groups that ranks wait for each other; then groups are divided. Several divisions are planned, and the one
whose slowest ranks finish first is used.
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from fsdptrain.data.packing.pack import (
    PackPlan,
    assign_packs_to_ranks,
    check_lengths,
    fill_packs,
    plan_packs,
    sequence_costs,
)

MOST_SHARED = 4  # largest ratio of samples to budget in a pack: attention gathers keys for each of their tokens
_NEARLY_BALANCED = 1.02


def plan_shared(
    lengths: Sequence[int], prompts: Sequence[tuple[int, int]], *, num_ranks: int, max_tokens: int
) -> PackPlan:
    """Return the cheapest plan, or that of `plan_packs` if no samples have the same prompt.

    In a pack the samples of one prompt are adjacent. A sample that shares its first P tokens costs less by the cost of
    P tokens; its own tokens still attend to the prefix. At most `max_tokens` tokens of a pack are computed, and its
    samples total at most MOST_SHARED times that.

    Args:
        prompts: per sample (prompt identity, prompt length). Length 0: no prompt.
    """
    check_lengths(lengths, max_tokens=max_tokens)
    families = _families(prompts)
    limits = {"num_ranks": num_ranks, "max_tokens": max_tokens}
    if not families:
        return plan_packs(lengths, **limits)
    samples = _Samples(
        lengths, prompts, costs=sequence_costs(lengths), prompt_costs=sequence_costs([length for _, length in prompts])
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
    return best


@dataclass(frozen=True)
class _Samples:
    """The samples of a rollout, and the cost of units of samples with one prompt in a pack. [tokens]"""

    lengths: Sequence[int]
    prompts: Sequence[tuple[int, int]]
    costs: Sequence[float]
    prompt_costs: Sequence[float]

    def tokens(self, unit: Sequence[int]) -> int:
        """Return the number of computed tokens."""
        return sum(self.lengths[i] for i in unit) - self.prompts[unit[0]][1] * (len(unit) - 1)

    def size(self, unit: Sequence[int]) -> int:
        """Return the share of a pack's budget."""
        return max(self.tokens(unit), -(-sum(self.lengths[i] for i in unit) // MOST_SHARED))

    def cost(self, unit: Sequence[int]) -> float:
        return math.fsum(self.costs[i] for i in unit) - self.prompt_costs[unit[0]] * (len(unit) - 1)


def _plan(
    samples: _Samples, units: Sequence[list[int]], shared: Set[tuple[int, int]], *, num_ranks: int, max_tokens: int
) -> PackPlan:
    """Pack `units`. Units of the same prompt in `shared` are merged if they are in one pack."""
    limits = {"num_ranks": num_ranks, "max_tokens": max_tokens}
    filled = fill_packs([samples.size(u) for u in units], [samples.cost(u) for u in units], **limits)
    packs = [_together([i for unit in pack for i in units[unit]], samples.prompts, shared) for pack in filled]
    num_tokens = sum(samples.tokens(unit) for pack in packs for unit in pack)
    found = assign_packs_to_ranks(
        [[i for unit in pack for i in unit] for pack in packs],
        [math.fsum(map(samples.cost, pack)) for pack in packs],
        num_tokens=num_tokens,
        **limits,
    )
    return replace(found, shared=1 - num_tokens / sum(samples.lengths))


def _families(prompts: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the samples of each prompt that several samples have, ordered by first sample."""
    found: dict[tuple[int, int], list[int]] = {}
    for index, prompt in enumerate(prompts):
        if prompt[1]:
            found.setdefault(prompt, []).append(index)
    return [family for family in found.values() if len(family) > 1]


def _cut(family: Sequence[int], lengths: Sequence[int], prompt: int, max_tokens: int) -> list[list[int]]:
    """Divide a group into as few units as the budgets allow. Each unit computes the prompt once."""
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
    """Group the members of a pack by shared prompt. All other members are groups of one."""
    found: dict[object, list[int]] = {}
    for index in members:
        found.setdefault(prompts[index] if prompts[index] in shared else index, []).append(index)
    return list(found.values())
